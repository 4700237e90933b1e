// Device "cuda" on a torch without CUDA, with real numbers: memory of this process, kernels of the CPU, and a log of what streams were given.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/core/CachingHostAllocator.h>
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
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

constexpr int MOST_DEVICES = 16;
thread_local int own_device = 0;
thread_local std::string label, place;  // what the thread works on, and from where in Python it waits
void (*on_wait)() = nullptr;            // says `place`
thread_local int64_t current_streams[MOST_DEVICES] = {};
std::atomic<int64_t> num_memories{1}, num_events{1}, num_threads{1};
thread_local const int64_t thread = num_threads++;
std::mutex mutex;
std::FILE* file = nullptr;  // the log, where SHARDPROOF_PRETENDED_LOG names a folder

int64_t here() { return current_streams[own_device]; }

// torch's pool: so many streams for each device and priority (of which there are two here), then the first again.
constexpr uint32_t STREAMS_OF_POOL = 32;
std::atomic<uint32_t> handed_out[MOST_DEVICES][2];
int64_t next_stream(int device, bool high_priority) {
  return 1 + (2 * device + high_priority) * STREAMS_OF_POOL + handed_out[device][high_priority]++ % STREAMS_OF_POOL;
}

// One line: what, thread, stream, name, memory that is read, memory that is written, what the thread works on; of a wait of the host also from where.
void write(const char* kind, int64_t stream, const std::string& name, const std::string& reads = "", const std::string& writes = "", const std::string& from = "") {
  static const char* folder = std::getenv("SHARDPROOF_PRETENDED_LOG");
  if (!folder) return;
  std::lock_guard<std::mutex> held(mutex);
  static pid_t owner = 0;
  if (owner != getpid()) {  // a rank that was forked has a log of its own
    owner = getpid();
    file = std::fopen((std::string(folder) + "/" + std::to_string(owner) + ".log").c_str(), "w");
  }
  if (file) std::fprintf(file, "%s\t%ld\t%ld\t%s\t%s\t%s\t%s\t%s\n", kind, (long)thread, (long)stream, name.c_str(), reads.c_str(), writes.c_str(), label.c_str(), from.c_str());
}

void host_waits(const char* kind, int64_t stream, const std::string& name) {
  if (on_wait) on_wait();
  write(kind, stream, name, "", "", place);
}

c10::DeviceIndex num_devices() {
  static const char* asked = std::getenv("SHARDPROOF_PRETENDED_DEVICES");
  return asked ? std::min(std::atoi(asked), MOST_DEVICES) : 8;
}

#include "captures.h"

struct Memory {
  int64_t id;
  void* data;
  size_t num_bytes;
  bool is_shared;
  std::shared_ptr<Pool> pool;  // none outside of captures
};

std::unordered_map<const void*, const Memory*> memories;  // by where they begin; under `mutex`
thread_local int64_t mem_pool = 0;  // the pool that this thread allocates from; 0 is everybody's
thread_local int next_shared = -1;  // the file that this thread's next allocation maps, for other processes to map it too

void release_as(const char* kind, void* context) {
  auto* memory = static_cast<Memory*>(context);
  write(kind, here(), std::to_string(memory->id));
  {
    std::lock_guard<std::mutex> held(mutex);
    memories.erase(memory->data);
  }
  {
    std::lock_guard<std::recursive_mutex> held(graph_mutex);
    live.erase(memory->id);
    places.erase(memory->id);
    shared_memory.erase(memory->id);
    if (memory->pool) {
      auto& block = memory->pool->blocks.at(memory->id);
      block.freed = true;
      memory->pool->let_go[block.stream].insert(block.graph);
    }
  }
  if (memory->is_shared) munmap(memory->data, memory->num_bytes);
  else if (!memory->pool) std::free(memory->data);
  delete memory;
}

void release(void* context) { release_as("free", context); }
void release_host(void* context) { release_as("free host", context); }

// A new memory: of this process, or of a file that others map too.
Memory* allocate_as(const char* kind, size_t num_bytes, std::shared_ptr<Pool> pool = nullptr, int file = -1) {
  void* data = nullptr;
  if (file >= 0) {
    if (ftruncate(file, num_bytes)) throw std::bad_alloc();
    data = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (data == MAP_FAILED) throw std::bad_alloc();
  } else if (posix_memalign(&data, 256, num_bytes ? num_bytes : 1)) {  // as the caching allocator aligns
    throw std::bad_alloc();
  }
  auto* memory = new Memory{num_memories++, data, num_bytes, file >= 0, pool};
  {
    std::lock_guard<std::recursive_mutex> held(graph_mutex);
    live.insert(memory->id);
    places[memory->id] = {data, num_bytes};
    if (memory->is_shared) shared_memory.insert(memory->id);
  }
  {
    std::lock_guard<std::mutex> held(mutex);
    memories[data] = memory;
  }
  write(kind, here(), std::to_string(memory->id), "", std::to_string(num_bytes));
  return memory;
}

struct PretendedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    auto* graph = capture_of(here(), "an allocation");
    const int shared = std::exchange(next_shared, -1);
    auto* memory = allocate_as("allocate", num_bytes, graph && shared < 0 ? graph->pool : nullptr, shared);
    if (mem_pool) write("in pool", here(), std::to_string(memory->id), "", "", std::to_string(mem_pool) + ":" + std::to_string(num_bytes));
    if (memory->pool) {
      std::lock_guard<std::recursive_mutex> held(graph_mutex);
      memory->pool->blocks[memory->id] = {memory->data, num_bytes, graph->id, here(), memory->pool->let_go[here()], false};
      write("in graph", here(), std::to_string(memory->id), "", "", std::to_string(graph->id) + ":" + std::to_string(memory->pool->memory) + ":" + std::to_string(num_bytes));
    }
    return {memory->data, memory, &release, c10::Device(c10::kCUDA, own_device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* target, const void* source, size_t count) const override { std::memcpy(target, source, count); }
};
PretendedAllocator allocator;

// Page-locked memory of the host, which streams read and write.
struct PretendedHostAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    auto* memory = allocate_as("allocate host", num_bytes);
    return {memory->data, memory, &release_host, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* target, const void* source, size_t count) const override { std::memcpy(target, source, count); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
PretendedHostAllocator host_allocator;

bool is_pinned(const at::Tensor& tensor) { return tensor.defined() && tensor.storage().data_ptr().get_deleter() == &release_host; }

int64_t memory_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !(tensor.is_cuda() || is_pinned(tensor))) return 0;
  const auto& pointer = tensor.storage().data_ptr();
  auto own = pointer.get_deleter() == &release || pointer.get_deleter() == &release_host;
  return own ? static_cast<Memory*>(pointer.get_context())->id : 0;
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
  S getNewStream(D on, int priority) const override { return stream(next_stream(on.index(), priority < 0), on); }
  S getStreamFromGlobalPool(D on, bool high_priority) const override { return stream(next_stream(on.index(), high_priority), on); }
  S exchangeStream(S next) const override {
    auto before = getStream(next.device());
    current_streams[next.device_index()] = next.id();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return num_devices(); }
  void record(void** event, const S& on, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new int64_t(0);
    auto id = *static_cast<int64_t*>(*event) = num_events++;
    if (num_captures) {
      std::lock_guard<std::recursive_mutex> held(graph_mutex);
      auto found = captured_streams.find(on.id());
      if (found != captured_streams.end()) captured_events[id] = {found->second->id, found->second->clocks[on.id()]};
    }
    write("record", on.id(), std::to_string(id));
  }
  void block(void* event, const S& on) const override {
    if (!event) return;
    joins(*static_cast<int64_t*>(event), on.id());
    write("wait", on.id(), std::to_string(*static_cast<int64_t*>(event)));
  }
  // A stream that waits for an event of a capture takes part in it; one that takes part waits for no other.
  static void joins(int64_t event, int64_t stream) {
    std::lock_guard<std::recursive_mutex> held(graph_mutex);
    auto known = captured_events.find(event);
    auto part = captured_streams.find(stream);
    if (known == captured_events.end()) {
      if (part == captured_streams.end()) return;
      part->second->failed = true;
      TORCH_CHECK(false, "a stream of a capture waits", label.empty() ? "" : " in ", label, " for what was recorded outside of it");
    }
    auto found = graphs.find(known->second.first);
    TORCH_CHECK(found != graphs.end() && !found->second->ended, "stream ", stream, " waits for an event of a capture that is over");
    if (part == captured_streams.end()) captured_streams[stream] = found->second.get();
    for (auto [of, number] : known->second.second) {
      auto& own = found->second->clocks[stream][of];
      own = std::max(own, number);
    }
  }
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<int64_t*>(event); }
  void synchronizeEvent(void* event) const override {
    no_wait("for an event");
    if (event) host_waits("host waits for event", here(), std::to_string(*static_cast<int64_t*>(event)));
  }
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 0.0; }
  bool queryStream(const S&) const override { return true; }
  void synchronizeStream(const S& on) const override { no_wait("for a stream"); host_waits("host waits for stream", on.id(), ""); }
  void synchronizeDevice(const c10::DeviceIndex) const override { no_wait("for the device"); host_waits("host waits for device", here(), ""); }
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

// Operators of CUDA whose results have a size, or whose answer is a value, that the host reads from the device (`aten/src/ATen/native/cuda` of torch).
bool waits_by_itself(const std::string& name, const std::vector<c10::IValue>& given) {
  static const std::set<std::string> always = {"aten::nonzero", "aten::masked_select", "aten::bincount", "aten::equal", "aten::_unique", "aten::_unique2",
                                               "aten::unique_dim", "aten::unique_consecutive", "aten::is_nonzero", "aten::histc"};
  if (always.count(name)) return true;
  if (name == "aten::repeat_interleave") return given.size() < 2 || !given.back().isInt();
  if (name != "aten::index" && name != "aten::index_put_" && name != "aten::_index_put_impl_") return false;
  if (given.size() < 2 || !given[1].isOptionalTensorList()) return false;
  for (const std::optional<at::Tensor>& each : given[1].toOptionalTensorList())
    if (each && (each->scalar_type() == at::kBool || each->scalar_type() == at::kByte)) return true;
  return false;
}

// The values that an operator was given, for its replays: memory of devices as it is then, numbers of the host as they are now.
std::vector<c10::IValue> kept(const std::vector<c10::IValue>& given, const std::vector<c10::IValue>& values) {
  auto found = values;
  for (size_t i = 0; i < given.size(); i++)
    if (given[i].isTensor() && given[i].toTensor().defined() && !given[i].toTensor().is_cuda()) found[i] = given[i].toTensor().clone();
  return found;
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
  auto* graph = capture_of(here(), schema.name());
  std::vector<c10::IValue> again;
  if (graph) {
    if (waits_by_itself(schema.name(), given)) no_wait(schema.name());
    begins(graph, writes);
    again = kept(given, aliases);
  }
  std::vector<std::pair<size_t, at::Tensor>> results, resized;  // by place among what is returned, and among what was given
  op.callBoxed(stack);
  for (size_t i = 0; i < count; i++) {  // results that the kernel has made larger
    const auto* alias = schema.arguments()[i].alias_info();
    if (!alias || !alias->isWrite() || !given[i].isTensor() || !given[i].toTensor().is_cuda()) continue;
    const auto &target = given[i].toTensor(), &result = aliases[i].toTensor();
    if (target.sizes() == result.sizes()) continue;
    resize_(target, result.sizes(), std::nullopt);
    if (result.numel()) on_cpu(target).copy_(result);
    resized.emplace_back(i, on_cpu(target));
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
      if (value.toTensor().defined()) results.emplace_back(i, on_cpu(value.toTensor()));
    } else if (value.isTensorList() && !alias) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& each : value.toTensorList()) {
        TORCH_CHECK(!graph, schema.name(), " makes a list of tensors, which captures of pretended CUDA do not know");
        auto made = as_cuda(each);
        writes.push_back(memory_of(made));
        list.push_back(made);
      }
      value = list;
    }
  }
  if (graph && (!writes.empty() || !results.empty())) {
    auto run = [op, again, results, resized, name = schema.name()]() {
      auto values = again;
      auto arguments = again;
      op.callBoxed(&values);
      for (auto& [i, target] : results) {
        const auto& made = values[i].toTensor();
        TORCH_CHECK(made.sizes() == target.sizes(), name, " has another result than when it was captured: ", made.sizes(), ", not ", target.sizes());
        if (target.numel()) at::Tensor(target).copy_(made);
      }
      for (auto& [i, target] : resized)
        if (target.numel()) at::Tensor(target).copy_(arguments[i].toTensor());
    };
    notes(graph, here(), reads, writes, {run, 0, schema.name() + (label.empty() ? "" : " in ") + label});
  }
  write("op", here(), schema.name(), joined(reads), joined(writes));
  if (place && waits_by_itself(schema.name(), given)) host_waits("host waits for stream", here(), schema.name());
}

// The memory of a tensor for a copy: of the host's also which bytes, because copies of parts of it go on at once.
std::string bytes_of(const at::Tensor& tensor) {
  auto id = memory_of(tensor);
  if (!id) return "";
  auto text = std::to_string(id);
  if (!is_pinned(tensor) || !tensor.is_contiguous()) return text;
  auto first = static_cast<const char*>(tensor.const_data_ptr()) - static_cast<const char*>(tensor.storage().data());
  return text + ":" + std::to_string(first) + ":" + std::to_string(first + static_cast<int64_t>(tensor.nbytes()));
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (auto* graph = capture_of(here(), "aten::copy_")) {
    // a replay would copy what lies there then: page-locked memory stays where it is
    const auto& of_host = self.is_cuda() ? source : self;
    if (!of_host.is_cuda() && !(non_blocking && is_pinned(of_host))) no_wait("a copy between host and device");
    begins(graph, {memory_of(self)});
    notes(graph, here(), {memory_of(source)}, {memory_of(self)},
          {[to = on_cpu(self), from = on_cpu(source)]() { at::Tensor(to).copy_(from); }, 0, "aten::copy_" + std::string(label.empty() ? "" : " in ") + label});
  }
  on_cpu(self).copy_(on_cpu(source));
  write("op", here(), "aten::copy_", bytes_of(source), bytes_of(self));
  // a copy between host and device is waited for unless it need not be and can be without: then what is pageable is copied on the way to the device
  if (self.is_cuda() != source.is_cuda() && !(non_blocking && (self.is_cuda() || is_pinned(self))))
    host_waits("host waits for stream", here(), self.is_cuda() ? "copy from the host" : "copy to the host");
  return self;
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  no_wait("a number for the host");
  write("op", here(), "aten::_local_scalar_dense", joined({memory_of(self)}), "");
  host_waits("host waits for stream", here(), "a number for the host");
  return at::_local_scalar_dense(on_cpu(self));
}

void record_stream(at::Tensor& self, c10::Stream stream) { write("record_stream", stream.id(), std::to_string(memory_of(self))); }

at::Tensor as_strided(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

// Products of bf16 operands in fp32, which CPUs have no kernel for.
at::Tensor& addmm_dtype_out(const at::Tensor& self, const at::Tensor& left, const at::Tensor& right, at::ScalarType dtype, const at::Scalar& beta, const at::Scalar& alpha, at::Tensor& out) {
  TORCH_CHECK(dtype == out.scalar_type() && dtype == at::kFloat, "out_dtype must be fp32, as out");
  return at::addmm_out(out, self.to(dtype), left.to(dtype), right.to(dtype), beta, alpha);
}

at::Tensor& mm_dtype_out(const at::Tensor& left, const at::Tensor& right, at::ScalarType dtype, at::Tensor& out) {
  TORCH_CHECK(dtype == out.scalar_type() && dtype == at::kFloat, "out_dtype must be fp32, as out");
  return at::mm_out(out, left.to(dtype), right.to(dtype));
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
  m.impl("addmm.dtype_out", addmm_dtype_out);
  m.impl("mm.dtype_out", mm_dtype_out);
}

C10_REGISTER_GUARD_IMPL(CUDA, Guard);
struct AtStart {
  AtStart() {
    c10::SetAllocator(c10::kCUDA, &allocator);
    at::setHostAllocator(c10::kCUDA, &host_allocator);
  }
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
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard<std::mutex> held(mutex);
    return memories.count(data) > 0;  // asked of memory of the host alone
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &host_allocator; }
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
int64_t pretended_allocate_from(int64_t pool) { return std::exchange(mem_pool, pool); }
void pretended_share(int file) { next_shared = file; }
void pretended_write(const char* kind, int64_t stream, const char* name, const char* reads, const char* writes) { write(kind, stream, name, reads, writes); }
void pretended_label(const char* text) { label = text; }
void pretended_place(const char* text) { place = text; }
void pretended_on_wait(void (*say)()) { on_wait = say; }
void pretended_flush() {
  std::lock_guard<std::mutex> held(mutex);
  if (file) std::fflush(file);
}
}

#include "replays.h"
