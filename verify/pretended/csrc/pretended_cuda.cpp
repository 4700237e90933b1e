// Device "cuda" on a torch without CUDA, with real numbers: memory of this process, kernels of the CPU, and a log of what streams were given.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include "generators.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

constexpr int MOST_DEVICES = 16;
thread_local int own_device = 0;
thread_local std::string label;
thread_local int64_t current_streams[MOST_DEVICES] = {};
std::atomic<int64_t> num_streams{1}, num_memories{1}, num_events{1}, num_threads{1};
thread_local const int64_t thread = num_threads++;
std::mutex mutex;
std::FILE* file = nullptr;  // the log, where SHARDPROOF_PRETENDED_LOG names a folder

int64_t here() { return current_streams[own_device]; }

// One line: what, thread, stream, name, memory that is read, memory that is written, what the thread works on.
void write(const char* kind, int64_t stream, const std::string& name, const std::string& reads = "", const std::string& writes = "") {
  static const char* folder = std::getenv("SHARDPROOF_PRETENDED_LOG");
  if (!folder) return;
  std::lock_guard<std::mutex> held(mutex);
  static pid_t owner = 0;
  if (owner != getpid()) {  // a rank that was forked has a log of its own
    owner = getpid();
    file = std::fopen((std::string(folder) + "/" + std::to_string(owner) + ".log").c_str(), "w");
  }
  if (file) std::fprintf(file, "%s\t%ld\t%ld\t%s\t%s\t%s\t%s\n", kind, (long)thread, (long)stream, name.c_str(), reads.c_str(), writes.c_str(), label.c_str());
}

c10::DeviceIndex num_devices() {
  static const char* asked = std::getenv("SHARDPROOF_PRETENDED_DEVICES");
  return asked ? std::min(std::atoi(asked), MOST_DEVICES) : 8;
}

struct Memory {
  int64_t id;
  void* data;
  size_t num_bytes;
  bool is_shared;
};

std::unordered_map<const void*, const Memory*> memories;  // by where they begin; under `mutex`
thread_local int next_shared = -1;  // the file that this thread's next allocation maps, for other processes to map it too

void release(void* context) {
  auto* memory = static_cast<Memory*>(context);
  write("free", here(), std::to_string(memory->id));
  {
    std::lock_guard<std::mutex> held(mutex);
    memories.erase(memory->data);
  }
  if (memory->is_shared) munmap(memory->data, memory->num_bytes);
  else std::free(memory->data);
  delete memory;
}

struct PretendedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    void* data = nullptr;
    const int shared = std::exchange(next_shared, -1);
    if (shared >= 0) {
      if (ftruncate(shared, num_bytes)) throw std::bad_alloc();
      data = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, shared, 0);
      if (data == MAP_FAILED) throw std::bad_alloc();
    } else if (posix_memalign(&data, 256, num_bytes ? num_bytes : 1)) {  // as the caching allocator aligns
      throw std::bad_alloc();
    }
    auto* memory = new Memory{num_memories++, data, num_bytes, shared >= 0};
    {
      std::lock_guard<std::mutex> held(mutex);
      memories[data] = memory;
    }
    write("allocate", here(), std::to_string(memory->id), "", std::to_string(num_bytes));
    return {data, memory, &release, c10::Device(c10::kCUDA, own_device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* target, const void* source, size_t count) const override { std::memcpy(target, source, count); }
};
PretendedAllocator allocator;

int64_t memory_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return 0;
  const auto& pointer = tensor.storage().data_ptr();
  return pointer.get_deleter() == &release ? static_cast<Memory*>(pointer.get_context())->id : 0;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  using D = c10::Device;
  using S = c10::Stream;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  static S stream(int64_t number, D on) { return S(S::UNSAFE, on, number); }
  c10::DeviceType type() const override { return c10::kCUDA; }
  D getDevice() const override { return D(c10::kCUDA, own_device); }
  D exchangeDevice(D next) const override {
    auto before = getDevice();
    setDevice(next);
    return before;
  }
  void setDevice(D next) const override { if (next.has_index()) own_device = next.index(); }
  void uncheckedSetDevice(D next) const noexcept override { setDevice(next); }
  S getStream(D on) const override { return stream(current_streams[on.index()], on); }
  S getDefaultStream(D on) const override { return stream(0, on); }
  S getNewStream(D on, int) const override { return stream(num_streams++, on); }
  S getStreamFromGlobalPool(D on, bool) const override { return stream(num_streams++, on); }
  S exchangeStream(S next) const override {
    auto before = getStream(next.device());
    current_streams[next.device_index()] = next.id();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return num_devices(); }
  void record(void** event, const S& on, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new int64_t(0);
    *static_cast<int64_t*>(*event) = num_events++;
    write("record", on.id(), std::to_string(*static_cast<int64_t*>(*event)));
  }
  void block(void* event, const S& on) const override {
    if (event) write("wait", on.id(), std::to_string(*static_cast<int64_t*>(event)));
  }
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<int64_t*>(event); }
  void synchronizeEvent(void* event) const override {
    if (event) write("host waits for event", here(), std::to_string(*static_cast<int64_t*>(event)));
  }
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 0.0; }
  bool queryStream(const S&) const override { return true; }
  void synchronizeStream(const S& on) const override { write("host waits for stream", on.id(), ""); }
  void synchronizeDevice(const c10::DeviceIndex) const override { write("host waits for device", here(), ""); }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const S& on) const override {
    if (pointer.get_deleter() == &release) write("record_stream", on.id(), std::to_string(static_cast<Memory*>(pointer.get_context())->id));
  }
};

at::Tensor on_cpu(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  auto options = tensor.options().device(c10::kCPU);
  if (!tensor.numel()) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  auto made = at::from_blob(tensor.mutable_data_ptr(), tensor.sizes(), tensor.strides(), options);
  return made;
}

// The device that a new tensor is asked for is the current one while its memory is made.
struct On {
  int before = own_device;
  explicit On(std::optional<c10::Device> asked) {
    if (asked && asked->has_index()) own_device = asked->index();
  }
  ~On() { own_device = before; }
};

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<c10::Layout>, std::optional<c10::Device> asked, std::optional<bool>,
                 std::optional<c10::MemoryFormat> format) {
  On on(asked);
  return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<c10::Layout>,
                         std::optional<c10::Device> asked, std::optional<bool>) {
  On on(asked);
  return at::detail::empty_strided_generic(size, stride, &allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype));
}

const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef size, std::optional<c10::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  auto needed = (impl->numel() + impl->storage_offset()) * impl->itemsize();
  if (needed > static_cast<int64_t>(impl->storage().nbytes())) {
    auto made = allocator.allocate(needed);
    if (impl->storage().nbytes()) std::memcpy(made.get(), impl->storage().data(), impl->storage().nbytes());
    const_cast<c10::Storage&>(impl->storage()).set_data_ptr_noswap(std::move(made));
    const_cast<c10::Storage&>(impl->storage()).set_nbytes(needed);
  }
  return self;
}

at::Tensor as_cuda(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.is_cuda()) return tensor;
  auto made = empty_strided(tensor.sizes(), tensor.strides(), tensor.scalar_type(), std::nullopt, std::nullopt, std::nullopt);
  if (tensor.numel()) on_cpu(made).copy_(tensor);
  return made;
}

std::string joined(const std::vector<int64_t>& ids) {
  std::string text;
  for (auto id : ids)
    if (id) text += (text.empty() ? "" : ",") + std::to_string(id);
  return text;
}

// The kernel of every operator that has none of its own: that of the CPU, on the same memory.
void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto count = schema.arguments().size();
  const auto first = stack->size() - count;
  std::vector<int64_t> reads, writes;
  std::optional<c10::Device> place;
  std::vector<c10::IValue> given(stack->begin() + first, stack->end());
  for (size_t i = 0; i < count; i++) {
    auto& value = (*stack)[first + i];
    const auto* alias = schema.arguments()[i].alias_info();
    auto& touched = alias && alias->isWrite() ? writes : reads;
    if (value.isTensor()) {
      if (!place && value.toTensor().defined() && value.toTensor().is_cuda()) place = value.toTensor().device();
      touched.push_back(memory_of(value.toTensor()));
      value = on_cpu(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& each : value.toTensorList()) {
        if (!place && each.is_cuda()) place = each.device();
        touched.push_back(memory_of(each));
        list.push_back(on_cpu(each));
      }
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& each : value.toOptionalTensorList()) {
        if (each) touched.push_back(memory_of(*each));
        list.push_back(each ? std::optional<at::Tensor>(on_cpu(*each)) : std::nullopt);
      }
      value = list;
    } else if (value.isGenerator()) {
      value = pretended::on_cpu(value.toGenerator());
    } else if (value.isDevice() && value.toDevice().is_cuda()) {
      place = value.toDevice();
      value = c10::Device(c10::kCPU);
    }
  }
  On on(place);
  std::vector<c10::IValue> aliases(stack->begin() + first, stack->end());
  op.callBoxed(stack);
  for (size_t i = 0; i < count; i++) {  // results that the kernel has made larger
    const auto* alias = schema.arguments()[i].alias_info();
    if (!alias || !alias->isWrite() || !given[i].isTensor() || !given[i].toTensor().is_cuda()) continue;
    const auto &target = given[i].toTensor(), &result = aliases[i].toTensor();
    if (target.sizes() == result.sizes()) continue;
    resize_(target, result.sizes(), std::nullopt);
    if (result.numel()) on_cpu(target).copy_(result);
  }
  const auto returns = schema.returns().size();
  const auto begin = stack->size() - returns;
  for (size_t i = 0; i < returns; i++) {
    auto& value = (*stack)[begin + i];
    const auto* alias = schema.returns()[i].alias_info();
    if (value.isTensor() && alias) {
      for (size_t j = 0; j < count; j++) {
        const auto* of = schema.arguments()[j].alias_info();
        if (!of || !given[j].isTensor() || *of != *alias) continue;
        const auto& from = given[j].toTensor();
        if (alias->isWrite()) {
          value = from;
        } else {
          const auto& view = value.toTensor();
          auto offset = (static_cast<const char*>(view.data_ptr()) - static_cast<const char*>(from.storage().data())) / view.itemsize();
          value = from.as_strided(view.sizes(), view.strides(), offset);
        }
        break;
      }
    } else if (value.isTensor()) {
      value = as_cuda(value.toTensor());
      writes.push_back(memory_of(value.toTensor()));
    } else if (value.isTensorList() && !alias) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& each : value.toTensorList()) {
        auto made = as_cuda(each);
        writes.push_back(memory_of(made));
        list.push_back(made);
      }
      value = list;
    }
  }
  write("op", here(), schema.name(), joined(reads), joined(writes));
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  on_cpu(self).copy_(on_cpu(source));
  write("op", here(), "aten::copy_", joined({memory_of(source)}), joined({memory_of(self)}));
  if (!self.is_cuda() && !(non_blocking && self.is_pinned())) write("host waits for stream", here(), "copy to the host");
  return self;
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  write("op", here(), "aten::_local_scalar_dense", joined({memory_of(self)}), "");
  write("host waits for stream", here(), "a number for the host");
  return at::_local_scalar_dense(on_cpu(self));
}

void record_stream(at::Tensor& self, c10::Stream stream) { write("record_stream", stream.id(), std::to_string(memory_of(self))); }

at::Tensor as_strided(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy_);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("resize_", resize_);
  m.impl("record_stream", record_stream);
  m.impl("as_strided", as_strided);
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
}

C10_REGISTER_GUARD_IMPL(CUDA, Guard);
struct AtStart {
  AtStart() { c10::SetAllocator(c10::kCUDA, &allocator); }
} at_start;

}  // namespace

namespace at {
struct CUDAHooks : CUDAHooksInterface {
  CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return num_devices(); }
  DeviceIndex getCurrentDevice() const override { return own_device; }
  DeviceIndex current_device() const override { return own_device; }
  bool isPinnedPtr(const void*) const override { return false; }
  Generator getNewGenerator(DeviceIndex device) const override {
    return make_generator<pretended::DeviceGenerator>(device < 0 ? own_device : device);
  }
};
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at

extern "C" {
// For the process groups in place of NCCL's: which memory an address is the begin of, a line of the log, and the log on disk.
int64_t pretended_memory(const void* data) {
  std::lock_guard<std::mutex> held(mutex);
  auto found = memories.find(data);
  return found == memories.end() ? 0 : found->second->id;
}
// Number, address and bytes of every allocation, three numbers each, as many as there is room for; how many there are.
int64_t pretended_memories(int64_t* numbers, int64_t room) {
  std::lock_guard<std::mutex> held(mutex);
  int64_t at = 0;
  for (const auto& [data, memory] : memories) {
    if (at == room) break;
    numbers[3 * at] = memory->id;
    numbers[3 * at + 1] = reinterpret_cast<int64_t>(data);
    numbers[3 * at++ + 2] = memory->num_bytes;
  }
  return memories.size();
}
void pretended_share(int file) { next_shared = file; }
void pretended_write(const char* kind, int64_t stream, const char* name, const char* reads, const char* writes) { write(kind, stream, name, reads, writes); }
void pretended_label(const char* text) { label = text; }
void pretended_flush() {
  std::lock_guard<std::mutex> held(mutex);
  if (file) std::fflush(file);
}
}
