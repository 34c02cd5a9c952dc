// Devices and what they can do, kernels (which do nothing: see late.py), and what libraries ask of driver, cuBLAS and NVML.
#include "device.h"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace {

constexpr int MULTIPROCESSORS = 108, SHARED_BYTES = 49152, SHARED_BYTES_OPTIN = 166912, THREADS = 2048;
constexpr int CUDA_RELEASE = 13020;  // 13.2

thread_local int chosen_device = 0;
thread_local cudaError_t last_error = cudaSuccess;
std::atomic<pid_t> user{0};  // the process that used CUDA first
std::atomic<bool> computes{false};

int capability() { return static_cast<int>(fake::setting("FAKE_CUDA_CAPABILITY", 80)); }

}  // namespace

namespace fake {

long setting(const char* name, long otherwise) {
    const char* value = std::getenv(name);
    return value ? std::atol(value) : otherwise;
}

int device_count() {
    const int all = static_cast<int>(std::min<long>(setting("FAKE_CUDA_DEVICES", 4), MAX_DEVICES));
    const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
    if (!visible) return all;
    if (!*visible || !std::strcmp(visible, "-1")) return 0;
    return std::min(all, 1 + static_cast<int>(std::count(visible, visible + std::strlen(visible), ',')));
}

size_t device_bytes() { return static_cast<size_t>(setting("FAKE_CUDA_MIB", 24 << 10)) << 20; }

int current_device() { return chosen_device; }

cudaError_t fail(cudaError_t error) { return last_error = error; }

bool usable() {
    if (!computes && setting("FAKE_CUDA_RESULTS", 1)) {
        std::fprintf(stderr, "fake CUDA: nothing computes here: tests/fake_cuda/site is not the first of PYTHONPATH\n");
        std::abort();
    }
    pid_t first = 0;
    if (user.compare_exchange_strong(first, getpid()) || first == getpid()) return true;
    std::fprintf(stderr, "fake CUDA: process %d uses CUDA after a fork from %d, which used it\n", getpid(), first);
    return false;
}

}  // namespace fake

EXPORTED void fake_cuda_compute() { computes = true; }  // late.py is there

// ---- devices

EXPORTED cudaError_t cudaGetDeviceCount(int* count) {
    *count = fake::device_count();
    return *count ? cudaSuccess : fake::fail(cudaErrorNoDevice);
}
EXPORTED cudaError_t cudaGetDevice(int* device) {
    NEEDS_DEVICE;
    *device = chosen_device;
    return cudaSuccess;
}
EXPORTED cudaError_t cudaSetDevice(int device) {
    NEEDS_DEVICE;
    if (device < 0 || device >= fake::device_count()) return fake::fail(cudaErrorInvalidDevice);
    chosen_device = device;
    return cudaSuccess;
}
EXPORTED cudaError_t cudaDriverGetVersion(int* version) {
    *version = CUDA_RELEASE;
    return cudaSuccess;
}
EXPORTED cudaError_t cudaRuntimeGetVersion(int* version) {
    *version = CUDA_RELEASE;
    return cudaSuccess;
}
EXPORTED cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
    std::memset(properties, 0, sizeof *properties);
    std::snprintf(properties->name, sizeof properties->name, "Fake GPU %d", capability());
    for (int i = 0; i < 16; ++i) properties->uuid.bytes[i] = static_cast<char>(i + device);
    properties->totalGlobalMem = fake::device_bytes();
    properties->major = capability() / 10;
    properties->minor = capability() % 10;
    properties->multiProcessorCount = MULTIPROCESSORS;
    properties->warpSize = 32;
    properties->maxThreadsPerBlock = properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = 1024;
    properties->maxThreadsDim[2] = 64;
    properties->maxThreadsPerMultiProcessor = THREADS;
    properties->sharedMemPerBlock = SHARED_BYTES;
    properties->sharedMemPerBlockOptin = SHARED_BYTES_OPTIN;
    properties->sharedMemPerMultiprocessor = 167936;
    properties->regsPerBlock = properties->regsPerMultiprocessor = 65536;
    properties->l2CacheSize = 40 << 20;
    properties->maxGridSize[0] = 2147483647;
    properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
    properties->textureAlignment = 512;
    properties->pciBusID = device;
    properties->unifiedAddressing = properties->concurrentKernels = 1;
    return cudaSuccess;
}
EXPORTED cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
    switch (attribute) {
        case cudaDevAttrComputeCapabilityMajor: *value = capability() / 10; break;
        case cudaDevAttrComputeCapabilityMinor: *value = capability() % 10; break;
        case cudaDevAttrMultiProcessorCount: *value = MULTIPROCESSORS; break;
        case cudaDevAttrMaxSharedMemoryPerBlock: *value = SHARED_BYTES; break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = SHARED_BYTES_OPTIN; break;
        case cudaDevAttrMaxThreadsPerBlock:
        case cudaDevAttrMaxBlockDimX: *value = 1024; break;
        case cudaDevAttrMaxThreadsPerMultiProcessor: *value = THREADS; break;
        case cudaDevAttrWarpSize: *value = 32; break;
        case cudaDevAttrMaxGridDimX: *value = 2147483647; break;
        case cudaDevAttrMaxGridDimY:
        case cudaDevAttrMaxGridDimZ: *value = 65535; break;
        case cudaDevAttrUnifiedAddressing: *value = 1; break;
        default: *value = 0;
    }
    return cudaSuccess;
}
EXPORTED cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
    *can = 0;
    return cudaSuccess;
}
EXPORTED cudaError_t cudaDeviceGetPCIBusId(char* text, int bytes, int device) {
    std::snprintf(text, bytes, "0000:%02x:00.0", device);
    return cudaSuccess;
}
EXPORTED cudaError_t cudaGetLastError() {
    const cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}
EXPORTED cudaError_t cudaPeekAtLastError() { return last_error; }
EXPORTED const char* cudaGetErrorName(cudaError_t) { return "fake CUDA error"; }
EXPORTED const char* cudaGetErrorString(cudaError_t error) {
    static thread_local char text[64];
    if (error == cudaErrorMemoryAllocation) return "out of memory";
    std::snprintf(text, sizeof text, "fake CUDA error %d", error);
    return text;
}

// ---- kernels: their launch is checked, and they do nothing

EXPORTED cudaError_t cudaLaunchKernel(const void*, dim3 grid, dim3 block, void**, size_t, cudaStream_t) {
    NEEDS_DEVICE;
    const bool valid = grid.x && grid.y && grid.z && block.x && block.y && block.z && grid.y <= 65535 &&
                       grid.z <= 65535 && block.x * block.y * block.z <= 1024;
    return valid ? cudaSuccess : fake::fail(cudaErrorInvalidConfiguration);
}
EXPORTED cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3 grid, dim3 block, void** a, size_t s, cudaStream_t stream) {
    return cudaLaunchKernel(nullptr, grid, block, a, s, stream);
}
EXPORTED cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void*, void** arguments) {
    return cudaLaunchKernel(nullptr, config->gridDim, config->blockDim, arguments, 0, config->stream);
}
namespace {
struct LaunchConfiguration {
    dim3 grid, block;
    size_t shared_bytes;
    void* stream;
};
thread_local std::vector<LaunchConfiguration> configurations;
}  // namespace
EXPORTED unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, void* stream) {
    configurations.push_back({grid, block, shared_bytes, stream});
    return 0;
}
EXPORTED cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes, void* stream) {
    const LaunchConfiguration last = configurations.back();
    configurations.pop_back();
    *grid = last.grid;
    *block = last.block;
    *shared_bytes = last.shared_bytes;
    *static_cast<void**>(stream) = last.stream;
    return cudaSuccess;
}
EXPORTED cudaError_t __cudaGetKernel(void** kernel, const void* function) {
    *kernel = const_cast<void*>(function);
    return cudaSuccess;
}
EXPORTED void** __cudaRegisterFatBinary(void*) {
    static void* handle[4];
    return handle;
}
EXPORTED cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
    std::memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = 1024;
    attributes->numRegs = 32;
    attributes->binaryVersion = attributes->ptxVersion = capability();
    return cudaSuccess;
}
EXPORTED cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
    *blocks = 2;
    return cudaSuccess;
}
EXPORTED cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int* blocks, const void*, int, size_t, unsigned) {
    *blocks = 2;
    return cudaSuccess;
}
EXPORTED cudaError_t cudaGetSymbolAddress(void** address, const void*) {
    static char memory[1 << 20];
    *address = memory;
    return cudaSuccess;
}

// ---- the driver

static int do_nothing() { return 0; }

EXPORTED cudaError_t cudaGetDriverEntryPointByVersion(
    const char* name, void** function, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* result) {
    void* known = dlsym(RTLD_DEFAULT, name);
    *function = known ? known : reinterpret_cast<void*>(do_nothing);
    if (result) *result = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
EXPORTED int cuDriverGetVersion(int* version) {
    *version = CUDA_RELEASE;
    return 0;
}
EXPORTED int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
    if (flags) *flags = 0;
    *active = user == getpid();
    return 0;
}
EXPORTED int cuCtxGetCurrent(void** context) {
    static int only;
    *context = &only;
    return 0;
}
EXPORTED int cuGetErrorString(int, const char** text) {
    *text = "fake driver error";
    return 0;
}

// ---- cuBLAS: handles, and a heuristic that finds one algorithm

EXPORTED int cublasCreate_v2(void** handle) {
    static int only;
    *handle = &only;
    return 0;
}
EXPORTED int cublasGetMathMode(void*, int* mode) {
    *mode = 0;
    return 0;
}
EXPORTED int cublasGetPointerMode_v2(void*, int* mode) {
    *mode = 0;
    return 0;
}
EXPORTED size_t cublasLtGetVersion() { return 130400; }

static int make_descriptor(void** descriptor) {
    *descriptor = std::calloc(1, 256);
    return 0;
}
EXPORTED int cublasLtMatmulDescCreate(void** descriptor, int, int) { return make_descriptor(descriptor); }
EXPORTED int cublasLtMatrixLayoutCreate(void** layout, int, long, long, long) { return make_descriptor(layout); }
EXPORTED int cublasLtMatmulPreferenceCreate(void** preference) { return make_descriptor(preference); }
static int destroy_descriptor(void* descriptor) {
    std::free(descriptor);
    return 0;
}
EXPORTED int cublasLtMatmulDescDestroy(void* descriptor) { return destroy_descriptor(descriptor); }
EXPORTED int cublasLtMatrixLayoutDestroy(void* layout) { return destroy_descriptor(layout); }
EXPORTED int cublasLtMatmulPreferenceDestroy(void* preference) { return destroy_descriptor(preference); }
EXPORTED int cublasLtMatmulAlgoGetHeuristic(
    void*, void*, void*, void*, void*, void*, void*, int, void* result, int* algorithms) {
    std::memset(result, 0, 16);
    *algorithms = 1;
    return 0;
}

// ---- NVML

EXPORTED int nvmlInit() { return 0; }  // torch's name
EXPORTED int nvmlInit_v2() { return 0; }
EXPORTED int nvmlInitWithFlags(unsigned) { return 0; }  // nvidia-ml-py's
EXPORTED int nvmlDeviceGetCount_v2(int* count) {
    *count = fake::device_count();
    return 0;
}
EXPORTED int nvmlDeviceGetHandleByUUID(const char* uuid, void** handle) {
    static int only;
    *handle = &only;
    return std::strncmp(uuid, "GPU-", 4) ? 2 : 0;
}
EXPORTED int nvmlDeviceGetMemoryInfo(void*, unsigned long long* total_free_used) {
    total_free_used[0] = total_free_used[1] = fake::device_bytes();
    total_free_used[2] = 0;
    return 0;
}
