// Generators of random numbers on pretended devices: those of the CPU, under the name of a device.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>

namespace pretended {

struct DeviceGenerator final : c10::GeneratorImpl {
  at::Generator own;
  explicit DeviceGenerator(c10::DeviceIndex device)
      : c10::GeneratorImpl(c10::Device(c10::kCUDA, device), c10::DispatchKeySet(c10::DispatchKey::CUDA)),
        own(at::make_generator<at::CPUGeneratorImpl>()) {}
  void set_current_seed(uint64_t seed) override { own.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { own.set_offset(offset); }
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return own.current_seed(); }
  uint64_t seed() override { return own.seed(); }
  void set_state(const c10::TensorImpl& state) override { own.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return own.unsafeGetGeneratorImpl()->get_state(); }
  DeviceGenerator* clone_impl() const override {
    auto* made = new DeviceGenerator(device().index());
    made->own = own.clone();
    return made;
  }
};

// The generator of the CPU that a generator of a pretended device stands for; any other one is itself.
inline at::Generator on_cpu(const at::Generator& generator) {
  if (!generator.defined() || generator.device().type() != c10::kCUDA) return generator;
  return static_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl())->own;
}

}  // namespace pretended
