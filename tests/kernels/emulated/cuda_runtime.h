// Enough of CUDA to run our kernels on a CPU, for tests: each thread of a block is a fiber, and blocks run one after
// another. Warp operations and barriers wait for all who must come; whoever waits for ever stops the program with a
// message. Threads take turns in an order drawn from EMULATED_SEED, so what depends on an order shows. Shared memory
// begins with noise, and an asynchronous copy arrives when it is waited for, not before.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <vector>
#include <ucontext.h>

#define __global__
#define __grid_constant__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static

struct uint2 { uint32_t x, y; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };
struct alignas(16) int4 { int x, y, z, w; };
struct dim3 { unsigned x = 1, y = 1, z = 1; dim3() = default; explicit dim3(unsigned n) : x(n) {} };
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }

namespace emulated {

constexpr size_t kStack = 96 << 10, kShared = 99 << 10;
struct Copy { void* to; unsigned char bytes[16]; };
struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[kStack]};
  std::deque<std::vector<Copy>> groups;
  std::vector<Copy> open;
  bool done = false;
};
struct Meeting {  // of a warp, or of the block
  int arrived = 0;
  unsigned turn = 0;
  uint32_t in[32] = {}, out[32] = {};
};
inline std::vector<std::unique_ptr<Fiber>> fibers;
inline std::vector<Meeting> warps;
inline Meeting block;
inline ucontext_t home;
inline int current, alive, threads;
inline std::function<void()> body;
alignas(128) inline unsigned char shared[kShared];
inline dim3 thread_index, block_index, grid_size;
inline std::mt19937& random() {
  static std::mt19937 made(std::getenv("EMULATED_SEED") ? std::atoi(std::getenv("EMULATED_SEED")) : 1);
  return made;
}

inline void yield() { swapcontext(&fibers[current]->context, &home); }

inline void enter() {
  body();
  fibers[current]->done = true;
  --alive;
  yield();
}

// What every lane of this thread's warp brings.
inline const uint32_t* meet(uint32_t value) {
  Meeting& m = warps[current / 32];
  const unsigned turn = m.turn;
  m.in[current % 32] = value;
  if (++m.arrived == 32) {
    std::memcpy(m.out, m.in, sizeof m.in);
    m.arrived = 0;
    ++m.turn;
  } else {
    while (m.turn == turn) yield();
  }
  return m.out;
}

inline void run(unsigned blocks, unsigned count, size_t bytes) {
  if (bytes > kShared) std::abort();
  threads = static_cast<int>(count);
  grid_size = dim3(blocks);
  while (fibers.size() < count) fibers.push_back(std::make_unique<Fiber>());
  std::vector<int> order(count);
  for (unsigned b = 0; b < blocks; ++b) {
    block_index = dim3(b);
    block_index.x = b;
    for (auto& byte : shared) byte = static_cast<unsigned char>(random()());
    warps.assign(count / 32, Meeting{});
    block = Meeting{};
    alive = threads;
    for (int i = 0; i < threads; ++i) {
      Fiber& f = *fibers[i];
      f.done = false;
      f.groups.clear();
      f.open.clear();
      getcontext(&f.context);
      f.context.uc_stack.ss_sp = f.stack.get();
      f.context.uc_stack.ss_size = kStack;
      f.context.uc_link = nullptr;
      makecontext(&f.context, enter, 0);
      order[i] = i;
    }
    std::shuffle(order.begin(), order.end(), random());
    while (alive) {
      const int before = alive;
      unsigned turns = block.turn;
      for (const Meeting& w : warps) turns += w.turn;
      for (const int i : order) {
        if (fibers[i]->done) continue;
        current = i;
        thread_index.x = static_cast<unsigned>(i);
        swapcontext(&home, &fibers[i]->context);
      }
      unsigned now = block.turn;
      for (const Meeting& w : warps) now += w.turn;
      if (now == turns && alive == before) {
        std::fprintf(stderr, "block %u: threads wait for others that never come\n", b);
        std::abort();
      }
    }
  }
}

}  // namespace emulated

#define threadIdx emulated::thread_index
#define blockIdx emulated::block_index

inline void __syncthreads() {
  auto& m = emulated::block;
  const unsigned turn = m.turn;
  if (++m.arrived == emulated::threads) {
    m.arrived = 0;
    ++m.turn;
  } else {
    while (m.turn == turn) emulated::yield();
  }
}
inline uint32_t __shfl_sync(uint32_t, uint32_t v, int lane) { return emulated::meet(v)[lane & 31]; }
inline uint32_t __shfl_up_sync(uint32_t, uint32_t v, int by) {
  const int lane = emulated::current % 32;
  const uint32_t* all = emulated::meet(v);
  return lane >= by ? all[lane - by] : v;
}
template <class F>
uint32_t emulated_fold(uint32_t v, F&& fold) {
  const uint32_t* all = emulated::meet(v);
  uint32_t sum = all[0];
  for (int i = 1; i < 32; ++i) sum = fold(sum, all[i]);
  return sum;
}
inline uint32_t __reduce_add_sync(uint32_t, uint32_t v) { return emulated_fold(v, [](uint32_t a, uint32_t b) { return a + b; }); }
inline uint32_t __reduce_min_sync(uint32_t, uint32_t v) { return emulated_fold(v, [](uint32_t a, uint32_t b) { return a < b ? a : b; }); }
inline uint32_t __reduce_max_sync(uint32_t, uint32_t v) { return emulated_fold(v, [](uint32_t a, uint32_t b) { return a > b ? a : b; }); }
inline uint32_t __ballot_sync(uint32_t, bool v) {
  const uint32_t* all = emulated::meet(v);
  uint32_t bits = 0;
  for (int i = 0; i < 32; ++i) bits |= all[i] << i;
  return bits;
}
inline bool __any_sync(uint32_t m, bool v) { return __ballot_sync(m, v) != 0; }
inline bool __all_sync(uint32_t m, bool v) { return __ballot_sync(m, v) == 0xFFFFFFFFu; }
inline uint32_t atomicAdd(uint32_t* at, uint32_t v) { const uint32_t old = *at; *at += v; return old; }
inline uint32_t atomicOr(uint32_t* at, uint32_t v) { const uint32_t old = *at; *at |= v; return old; }
inline int __popc(uint32_t v) { return __builtin_popcount(v); }
inline int __clz(uint32_t v) { return v ? __builtin_clz(v) : 32; }
inline int __ffs(uint32_t v) { return __builtin_ffs(static_cast<int>(v)); }
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return static_cast<uint32_t>(static_cast<uint64_t>(a) * b >> 32); }
inline uint32_t __funnelshift_l(uint32_t low, uint32_t high, uint32_t by) {
  by &= 31;
  return by ? high << by | low >> (32 - by) : high;
}
inline uint32_t __float_as_uint(float x) { uint32_t v; std::memcpy(&v, &x, 4); return v; }
inline float __uint_as_float(uint32_t v) { float x; std::memcpy(&x, &v, 4); return x; }
inline float emulated_canonical(float x) { return x != x ? __uint_as_float(0x7FFFFFFFu) : x; }  // as the hardware
inline float __fadd_rn(float a, float b) { volatile float sum = a + b; return emulated_canonical(sum); }
inline float __fsub_rn(float a, float b) { volatile float sum = a - b; return emulated_canonical(sum); }
template <class T> T __ldg(const T* at) { return *at; }
template <class T> T min(T a, T b) { return a < b ? a : b; }
template <class T> T max(T a, T b) { return a > b ? a : b; }
inline void __trap() { std::fprintf(stderr, "trap\n"); std::abort(); }

struct SharedVectors {
  const uint4* vectors;
  explicit SharedVectors(const uint4* at) : vectors(at) {}
  template <int kFrom> void copy(int i, const void* global) const {
    emulated::Copy copy{const_cast<uint4*>(vectors) + i + kFrom, {}};
    std::memcpy(copy.bytes, static_cast<const uint4*>(global) + kFrom, 16);
    std::memset(copy.to, 0xFF, 16);
    emulated::fibers[emulated::current]->open.push_back(copy);
  }
};
inline void copy_group() {
  auto& f = *emulated::fibers[emulated::current];
  f.groups.push_back(std::move(f.open));
  f.open.clear();
}
template <int kLater> void copy_wait() {
  auto& groups = emulated::fibers[emulated::current]->groups;
  while (groups.size() > kLater) {
    for (const auto& copy : groups.front()) std::memcpy(copy.to, copy.bytes, 16);
    groups.pop_front();
  }
}
struct SharedWords {
  uint32_t* words;
  explicit SharedWords(const uint32_t* at) : words(const_cast<uint32_t*>(at)) {}
  void count(uint32_t i) const { ++words[i]; }
  uint32_t take(uint32_t amount) const { return atomicAdd(words, amount); }
};
inline uint32_t warp_inclusive(uint32_t v) {
  const int lane = emulated::current % 32;
  const uint32_t* all = emulated::meet(v);
  v = 0;
  for (int i = 0; i <= lane; ++i) v += all[i];
  return v;
}
inline void wait_for_earlier() {}
inline void allow_next() {}
inline unsigned char* dynamic_memory() { return emulated::shared; }

using cudaError_t = int;
using cudaStream_t = void*;
constexpr int cudaSuccess = 0, cudaFuncAttributeMaxDynamicSharedMemorySize = 0;
constexpr int cudaLaunchAttributeProgrammaticStreamSerialization = 0;
struct cudaLaunchAttribute { int id; struct { int programmaticStreamSerializationAllowed; } val; };
struct cudaLaunchConfig_t { dim3 gridDim, blockDim; size_t dynamicSmemBytes; cudaStream_t stream; cudaLaunchAttribute* attrs; unsigned numAttrs; };
template <class K> int cudaFuncSetAttribute(K, int, int bytes) { return bytes > static_cast<int>(emulated::kShared); }
inline const char* cudaGetErrorString(int) { return "emulated"; }
template <class... P, class... A>
int cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(P...), A... arguments) {
  emulated::body = [=] { kernel(arguments...); };
  emulated::run(config->gridDim.x, config->blockDim.x, config->dynamicSmemBytes);
  return 0;
}
