// A device for tests: `second:0` and `second:1`, with host memory, CPU kernels, and a timeline in place of a queue.
//
// A kernel computes when it is launched. Its stream then counts as busy for the time that this took, or for as long as
// `spin` says; events happen, and waits end, when the stream is over that point. So launches return before the device
// is done, as on a GPU, and no thread is needed, so that processes can be forked.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/ScopeExit.h>
#include <torch/extension.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <mutex>
#include <thread>

namespace {

using c10::Device, c10::DeviceIndex, c10::Stream;
constexpr auto KIND = c10::DeviceType::PrivateUse1;
constexpr int NUM_DEVICES = 2, NUM_STREAMS = 4;
using Clock = std::chrono::steady_clock;

double now() { return std::chrono::duration<double>(Clock::now().time_since_epoch()).count(); }
void wait_until(double moment) {  // it spins at the end, as CUDA does: a thread that slept wakes too late
    if (moment - now() > 2e-3) std::this_thread::sleep_for(std::chrono::duration<double>(moment - now() - 1e-3));
    while (now() < moment) {}
}

struct Memory { int64_t held = 0, peak = 0, number = 0, total = 0, limit = int64_t{1} << 32; };

std::recursive_mutex lock;  // autograd launches from threads of its own
double free_from[NUM_DEVICES][NUM_STREAMS];  // when the work of each stream is done
Memory memory[NUM_DEVICES];
thread_local DeviceIndex current = 0;
thread_local int streams[NUM_DEVICES];
thread_local bool is_inside = false;  // a kernel's own copies neither wait nor count

DeviceIndex index_of(Device device) { return device.has_index() ? device.index() : current; }
Stream stream_of(DeviceIndex index, int number) { return Stream(Stream::UNSAFE, Device(KIND, index), number); }

void launch(double seconds) {
    std::lock_guard guard(lock);
    double& until = free_from[current][streams[current]];
    until = std::max(now(), until) + seconds;
}

double done(Stream stream) {
    std::lock_guard guard(lock);
    return std::max(now(), free_from[index_of(stream.device())][stream.id()]);
}

void synchronize(DeviceIndex index) {
    for (int number = 0; number < NUM_STREAMS; ++number) wait_until(done(stream_of(index, number)));
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override { return KIND; }
    Device getDevice() const override { return Device(KIND, current); }
    Device exchangeDevice(Device device) const override {
        const Device before = getDevice();
        setDevice(device);
        return before;
    }
    void setDevice(Device device) const override {
        TORCH_CHECK(device.index() < NUM_DEVICES, "there is no device ", device);
        current = index_of(device);
    }
    void uncheckedSetDevice(Device device) const noexcept override { current = index_of(device); }
    DeviceIndex deviceCount() const noexcept override { return NUM_DEVICES; }
    Stream getStream(Device device) const override { return stream_of(index_of(device), streams[index_of(device)]); }
    Stream getDefaultStream(Device device) const override { return stream_of(index_of(device), 0); }
    Stream getNewStream(Device device, int) const override {
        static int number = 0;
        return stream_of(index_of(device), 1 + number++ % (NUM_STREAMS - 1));
    }
    Stream exchangeStream(Stream stream) const override {
        const Stream before = getStream(stream.device());
        streams[stream.device_index()] = static_cast<int>(stream.id());
        return before;
    }
    bool queryStream(const Stream& stream) const override { return done(stream) <= now(); }
    void synchronizeStream(const Stream& stream) const override { wait_until(done(stream)); }
    void synchronizeDevice(const DeviceIndex index) const override { synchronize(index); }
    void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
        if (*event == nullptr) *event = new double;
        *static_cast<double*>(*event) = done(stream);
    }
    void block(void* event, const Stream& stream) const override {
        std::lock_guard guard(lock);
        double& until = free_from[stream.device_index()][stream.id()];
        until = std::max(until, *static_cast<double*>(event));
    }
    bool queryEvent(void* event) const override { return *static_cast<double*>(event) <= now(); }
    void synchronizeEvent(void* event) const override { wait_until(*static_cast<double*>(event)); }
    void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<double*>(event); }
    double elapsedTime(void* start, void* end, const DeviceIndex) const override {
        return 1e3 * (*static_cast<double*>(end) - *static_cast<double*>(start));
    }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Block { void* data; int64_t size; DeviceIndex index; };

struct Allocator final : c10::Allocator {
    c10::DataPtr allocate(size_t size) override {
        std::lock_guard guard(lock);
        Memory& all = memory[current];
        const auto bytes = static_cast<int64_t>(size);
        TORCH_CHECK_WITH(OutOfMemoryError, all.held + bytes <= all.limit, "second:", int(current), " out of memory");
        all.held += bytes, all.total += bytes, all.number += bytes > 0;
        all.peak = std::max(all.peak, all.held);
        auto* block = new Block{std::aligned_alloc(64, (size + 63) / 64 * 64), bytes, current};
        return {block->data, block, &release, Device(KIND, current)};
    }
    static void release(void* context) {
        std::lock_guard guard(lock);
        auto* block = static_cast<Block*>(context);
        memory[block->index].held -= block->size;
        std::free(block->data);
        delete block;
    }
    c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
    void copy_data(void* target, const void* source, size_t size) const override { default_copy_data(target, source, size); }
};
Allocator allocator;
REGISTER_ALLOCATOR(KIND, &allocator)

struct Generator final : at::CPUGeneratorImpl {
    explicit Generator(DeviceIndex index) {
        device_ = Device(KIND, index);
        key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
    }
};

struct Hooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(DeviceIndex) const override { return true; }
    DeviceIndex deviceCount() const override { return NUM_DEVICES; }
    DeviceIndex getCurrentDevice() const override { return current; }
    void setCurrentDevice(DeviceIndex index) const override { Guard().setDevice(Device(KIND, index)); }
    DeviceIndex exchangeDevice(DeviceIndex index) const override { return std::exchange(current, index); }
    DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return std::exchange(current, index); }
    at::Generator getNewGenerator(DeviceIndex index) const override {
        return at::make_generator<Generator>(index < 0 ? current : index);
    }
    const at::Generator& getDefaultGenerator(DeviceIndex index) const override {
        static const at::Generator all[NUM_DEVICES] = {at::make_generator<Generator>(0), at::make_generator<Generator>(1)};
        return all[index < 0 ? current : index];
    }
};

// The tensor's memory, which is the host's, as a CPU tensor.
at::Tensor on_host(const at::Tensor& tensor) {
    const auto kind = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
    auto plain = at::from_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(), kind);
    if (tensor.is_conj()) plain = plain.conj();
    return tensor.is_neg() ? plain._neg_view() : plain;
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
    const c10::DeviceGuard guard(device.value_or(Device(KIND, current)));
    const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
    return at::detail::empty_strided_generic(size, stride, &allocator, keys, c10::dtype_or_default(dtype));
}

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
    const c10::DeviceGuard guard(device.value_or(Device(KIND, current)));
    const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
    return at::detail::empty_generic(size, &allocator, keys, c10::dtype_or_default(dtype), format);
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool) {
    const bool crosses = source.device() != target.device();
    for (const auto& each : {source, target})
        if (crosses && !is_inside && each.device().type() == KIND) synchronize(each.device().index());
    const double start = now();
    (target.is_cpu() ? target : on_host(target)).copy_(source.is_cpu() ? source : on_host(source));
    const c10::DeviceGuard guard(target.is_cpu() ? source.device() : target.device());
    if (!crosses && !is_inside) launch(now() - start);
    return target;
}

at::Tensor copy_and_resize(const at::Tensor& source, const at::Tensor& target) {
    target.resize_(source.sizes());
    return copy_from(source, target, false);
}

at::Scalar read_number(const at::Tensor& tensor) {
    synchronize(tensor.device().index());
    return on_host(tensor).item();
}

void fall_back(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    const auto& name = op.schema().name();
    const bool may_mix = name.find("index") != std::string::npos;  // indices may be on the host, as on a GPU
    std::optional<Device> place;
    const auto see = [&](const at::Tensor& tensor) {
        if (!tensor.defined() || (tensor.is_cpu() && (tensor.dim() == 0 || may_mix))) return;
        if (place && *place != tensor.device())
            TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", *place,
                        " and ", tensor.device(), "! (in ", name, ")");
        place = tensor.device();
    };
    std::vector<std::pair<at::Generator, at::Generator>> generators;
    for (auto& value : torch::jit::last(*stack, op.schema().arguments().size())) {
        if (value.isTensor()) see(value.toTensor());
        if (value.isTensorList()) for (const auto& each : value.toTensorVector()) see(each);
        if (value.isGenerator() && value.toGenerator().device().type() == KIND) {
            generators.emplace_back(value.toGenerator(), at::make_generator<at::CPUGeneratorImpl>());
            generators.back().second.set_state(generators.back().first.get_state());
            const_cast<c10::IValue&>(value) = generators.back().second;
        }
    }
    const c10::OptionalDeviceGuard guard(place && !place->is_cpu() ? place : std::nullopt);
    const double start = now();
    const bool was_inside = std::exchange(is_inside, true);
    const auto restore = c10::make_scope_exit([&] { is_inside = was_inside; });
    at::native::cpu_fallback(op, stack);
    for (auto& [ours, used] : generators) ours.set_state(used.get_state());
    if (!was_inside) launch(now() - start);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
    library.fallback(torch::CppFunction::makeFromBoxedFunction<&fall_back>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
    library.impl("empty.memory_format", empty);
    library.impl("empty_strided", empty_strided);
    library.impl("_copy_from", copy_from);
    library.impl("_copy_from_and_resize", copy_and_resize);
    library.impl("_local_scalar_dense", read_number);
    library.impl("as_strided", at::native::as_strided_tensorimpl);
    library.impl("view", at::native::view);
    library.impl("_reshape_alias", at::native::_reshape_alias);
    library.impl("resize_", at::native::resize_);
    library.impl("set_.source_Tensor", at::native::set_tensor_);
    library.impl("set_.source_Storage", at::native::set_);
    library.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
    at::RegisterPrivateUse1HooksInterface(new Hooks());
    module.def("spin", launch, "Keep the current stream of the current device busy for some seconds.");
    module.def("default_generator", [](int index) { return Hooks().getDefaultGenerator(index); });
    module.def("set_limit", [](int index, int64_t limit) { std::swap(memory[index].limit, limit); return limit; });
    module.def("memory", [](int index) {
        const Memory& all = memory[index];
        return std::make_tuple(all.held, all.peak, all.number, all.total, all.limit);
    });
    module.def("reset_peak", [](int index) { memory[index].peak = memory[index].held; });
}
