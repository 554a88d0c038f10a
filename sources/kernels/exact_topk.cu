// Exact, deterministic top-k of the rows of a score matrix, for the sparse-attention indexer.
//
// Contract (each row by itself):
//   window   columns [start, start + m0), m0 = min(max(length, 0), width - start). A start outside [0, width] empties
//            the row. Columns outside the window are never used. The scores are never written.
//   choice   m = min(m0, k) columns by (score descending, column ascending). -0.0 equals +0.0, infinities are
//            ordinary, NaN of any sign and payload ranks below -inf and can be chosen.
//   output   the chosen columns, relative to start, ascending; then -1 up to k. Each column p passes one of three maps:
//            raw p; ragged p + offset[row]; paged table[r][p / page] * page + p % page, or -1 where p lies beyond the
//            table or no table row belongs to the score row.
//
// Why the result cannot depend on scheduling: what a row returns is a function of its k-th pair of (key, column), and
// that pair comes from counts over the whole row. A list of survivors is either by column, and then its order is the
// output's, or in order of arrival, and then only counts and sets are read from it and a bitmap over the columns orders
// the output. A sample of the row only proposes where to look; counts decide, and a proposal that fails costs one more
// search, never a wrong member.
// Nothing waits for another block: no spin barrier, no cluster, so no rule on residency.
//
// Nothing is allocated and nothing is read back by the host. Shared memory stays below 99 KB (sm_120).

#include <cstddef>
#include <cstdint>
#include <cuda_runtime.h>

#ifndef EXACT_TOPK_IDENTITY
#error "build with -DEXACT_TOPK_IDENTITY=\"<sha256 of this file>\""
#endif

// Filled in by the caller in the same order; keep in step with `Arguments` of exact_topk.py.
struct Arguments {
  const void* scores;        // [rows, width], the last dimension contiguous
  const int* lengths;        // [rows]
  const int* starts;         // [rows] or null: 0
  const int* offsets;        // [rows], ragged only
  const int* table;          // [table_rows, table_width], paged only
  const int* segments;       // [segment_count + 1] ascending: rows of table row j; null: row i has table row i
  const int* segment_table;  // [segment_count] or null: table row of each segment
  int* out;                  // [rows, k]
  void* workspace;           // exact_topk_workspace() bytes, 16-byte aligned; need not be initialised
  long long rows;
  long long width;
  long long stride;  // elements between rows of scores; 0 is allowed
  long long table_rows;
  long long table_width;
  long long table_stride;  // elements between rows of the table
  long long workspace_bytes;
  int segment_count;
  int k;
  int page_shift;
  int mode;         // 0 raw, 1 ragged, 2 paged
  int bf16;         // 0: float32
  int path;         // 0: chosen here; 1 resident; 2 stream; 3 split. Paths differ in time only
  int split;        // blocks for each row on path 3; 0: chosen here
  int sample_rank;  // 0: chosen here; else the rank of the pivot in the sample (tests force failing pivots with it)
  int processors;   // multiprocessors of the device
};

namespace {

constexpr uint32_t kFull = 0xFFFFFFFFu;
constexpr int kMaxK = 2048;
constexpr int kBins = 2048;
constexpr int kBinBits = 11;
constexpr int kFew = 32;        // elements that are ranked by comparing all with all, a warp for each
constexpr uint32_t kMany = 1024;  // elements of a bin from which on it pays to look for its extremes
constexpr int kMaxSplit = 64;

static_assert(kMaxK <= kBins, "winners are kept where the bins were");

// ---------------------------------------------------------------------------------------------------------------
// Instructions without a name in C++. The emulation for tests on a CPU brings its own.

#ifdef __CUDACC__
// 16-byte vectors of shared memory by their own address, which is computed once.
struct SharedVectors {
  uint32_t at;
  __device__ __forceinline__ explicit SharedVectors(const uint4* vectors)
      : at(static_cast<uint32_t>(__cvta_generic_to_shared(vectors))) {
    asm("" : "+r"(at));
  }
  // Starts a copy from global memory that runs on its own until it is waited for; kFrom vectors further on both sides.
  template <int kFrom>
  __device__ __forceinline__ void copy(int i, const void* global) const {
    asm volatile("cp.async.cg.shared.global [%0 + %2], [%1 + %2], 16;" ::"r"(at + i * 16), "l"(global), "n"(kFrom * 16)
                 : "memory");
  }
};
__device__ __forceinline__ void copy_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until at most kLater of this thread's groups are unfinished.
template <int kLater>
__device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLater) : "memory");
}
// Until the kernels that this one follows are done and their stores are seen.
__device__ __forceinline__ void wait_for_earlier() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// The kernel that follows may be set up; it waits for this one by itself.
__device__ __forceinline__ void allow_next() { asm volatile("griddepcontrol.launch_dependents;"); }
__device__ __forceinline__ unsigned char* dynamic_memory() {
  extern __shared__ __align__(16) unsigned char memory[];
  return memory;
}
// Words of shared memory by their own address, which is computed once.
struct SharedWords {
  uint32_t at;
  __device__ __forceinline__ explicit SharedWords(const uint32_t* words)
      : at(static_cast<uint32_t>(__cvta_generic_to_shared(words))) {}
  __device__ __forceinline__ void count(uint32_t i) const {
    asm volatile("red.shared.add.u32 [%0], 1;" ::"r"(at + i * 4) : "memory");
  }
  __device__ __forceinline__ uint32_t take(uint32_t amount) const {
    uint32_t before;
    asm volatile("atom.shared.add.u32 %0, [%1], %2;" : "=r"(before) : "r"(at), "r"(amount) : "memory");
    return before;
  }
};
__device__ __forceinline__ uint32_t warp_inclusive(uint32_t v) {
#pragma unroll
  for (int d = 1; d < 32; d <<= 1)
    asm("{ .reg .u32 r; .reg .pred p; shfl.sync.up.b32 r|p, %0, %1, 0, -1; @p add.u32 %0, r, %0; }" : "+r"(v) : "r"(d));
  return v;
}
#endif

// Keeps the compiler from computing in advance, and holding in registers, what follows from v.
template <class V>
__device__ __forceinline__ V opaque(V v) {
  asm("" : "+r"(v));
  return v;
}

// ---------------------------------------------------------------------------------------------------------------
// Keys: unsigned integers in the order of the scores. 0 is NaN, or no element; 0x80000000 belongs to no score.

constexpr uint32_t kLowest = 0x00800000u;    // key of -inf
constexpr uint32_t kHighest = 0xFF800001u;   // key of +inf
constexpr uint32_t kMinusZero = 0x80000000u;  // the key that -0.0 would have

__device__ __forceinline__ uint32_t key_of(float x) {
  const uint32_t bits = __float_as_uint(__fadd_rn(x, 0.0f));  // -0.0 becomes 0.0, any NaN 0x7FFFFFFF
  return (bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u)) + 1u;
}

__device__ __forceinline__ float value_of(uint32_t key) {
  const uint32_t ordered = key - 1u;
  return __uint_as_float(ordered & 0x80000000u ? ordered & 0x7FFFFFFFu : ~ordered);
}

struct Bf16 {
  uint16_t bits;
};

template <class T>
struct Format;

template <>
struct Format<float> {
  static constexpr int kPer = 4;  // elements in 16 bytes
  static __device__ __forceinline__ float load(const float* at) { return __ldg(at); }
  static __device__ __forceinline__ float part(const uint4& v, int c) {
    return __uint_as_float(c == 0 ? v.x : c == 1 ? v.y : c == 2 ? v.z : v.w);
  }
  static __device__ __forceinline__ void put(uint32_t* words, int c, float x) { words[c] = __float_as_uint(x); }
  static __device__ __forceinline__ float stored(const uint4* v, uint32_t c) {
    return __uint_as_float(reinterpret_cast<const uint32_t*>(v)[c]);
  }
};

template <>
struct Format<Bf16> {
  static constexpr int kPer = 8;
  static __device__ __forceinline__ float load(const Bf16* at) {
    return __uint_as_float(static_cast<uint32_t>(__ldg(reinterpret_cast<const unsigned short*>(at))) << 16);
  }
  static __device__ __forceinline__ float part(const uint4& v, int c) {
    const int word = c >> 1;
    const uint32_t pair = word == 0 ? v.x : word == 1 ? v.y : word == 2 ? v.z : v.w;
    return __uint_as_float(c & 1 ? pair & 0xFFFF0000u : pair << 16);
  }
  static __device__ __forceinline__ void put(uint32_t* words, int c, float x) {
    const uint32_t bits = __float_as_uint(x);
    uint32_t& word = words[c >> 1];
    word = c & 1 ? (word & 0xFFFFu) | bits : (word & 0xFFFF0000u) | bits >> 16;
  }
  static __device__ __forceinline__ float stored(const uint4* v, uint32_t c) {
    return __uint_as_float(static_cast<uint32_t>(reinterpret_cast<const unsigned short*>(v)[c]) << 16);
  }
};

// ---------------------------------------------------------------------------------------------------------------
// A row.

template <class T>
struct Row {
  static constexpr int kPer = Format<T>::kPer;
  const T* first;  // the window's first element
  int length;      // of the window
  int lead;        // elements by which `first` lies behind a 16-byte boundary
  long long number;

  __device__ __forceinline__ int vectors() const { return (lead + length + kPer - 1) / kPer; }
  __device__ __forceinline__ const uint4* vector(int v) const {
    return reinterpret_cast<const uint4*>(first + (v * kPer - lead));
  }
  // 16-byte vector v, with NaN in place of what lies outside the window.
  __device__ __forceinline__ uint4 whole(int v) const {
    const int column = v * kPer - lead;
    if (column >= 0 && column + kPer <= length) return __ldg(vector(v));
    uint32_t words[4] = {kFull, kFull, kFull, kFull};
#pragma unroll
    for (int c = 0; c < kPer; ++c) {
      if (static_cast<unsigned>(column + c) < static_cast<unsigned>(length))
        Format<T>::put(words, c, Format<T>::load(first + column + c));
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
  }
  // Calls use(score, column) for the elements of 16-byte vector v that lie in the window.
  template <class F>
  __device__ __forceinline__ void visit(int v, F&& use) const {
    const int column = v * kPer - lead;
    if (column >= 0 && column + kPer <= length) {
      const uint4 raw = __ldg(vector(v));
#pragma unroll
      for (int c = 0; c < kPer; ++c) use(Format<T>::part(raw, c), column + c);
    } else {
#pragma unroll
      for (int c = 0; c < kPer; ++c) {
        if (static_cast<unsigned>(column + c) < static_cast<unsigned>(length))
          use(Format<T>::load(first + column + c), column + c);
      }
    }
  }
};

template <class T>
__device__ Row<T> row_of(const Arguments& a, long long number) {
  const long long start = a.starts ? a.starts[number] : 0;
  long long length = a.lengths[number];
  const long long room = start < 0 ? 0 : a.width - start;
  length = length < room ? length : room;
  Row<T> row;
  row.length = length < 0 ? 0 : static_cast<int>(length);
  row.first = static_cast<const T*>(a.scores) + number * a.stride + (row.length ? start : 0);
  row.lead = static_cast<int>((reinterpret_cast<uintptr_t>(row.first) & 15u) / sizeof(T));
  row.number = number;
  return row;
}

// Where a chosen column goes.
struct Map {
  const int* table;
  long long pages;
  int shift;
  int mask;
  int offset;
  bool paged;

  __device__ __forceinline__ int operator()(int p) const {
    if (!paged) return p + offset;
    const int page = p >> shift;
    return page < pages ? (__ldg(table + page) << shift) + (p & mask) : -1;
  }
};

__device__ Map map_of(const Arguments& a, long long number) {
  Map map{nullptr, 0, 0, 0, 0, a.mode == 2};
  if (a.mode == 1) map.offset = a.offsets[number];
  if (a.mode != 2) return map;
  long long table_row = number;
  if (a.segments) {
    int low = 0, high = a.segment_count;  // the last segment that begins at or before the row
    while (high - low > 1) {
      const int middle = (low + high) >> 1;
      (a.segments[middle] <= number ? low : high) = middle;
    }
    const bool inside = a.segment_count > 0 && a.segments[low] <= number && number < a.segments[low + 1];
    table_row = !inside ? -1 : a.segment_table ? a.segment_table[low] : low;
  }
  map.shift = a.page_shift;
  map.mask = (1 << a.page_shift) - 1;
  if (table_row >= 0 && table_row < a.table_rows) {
    map.table = a.table + table_row * a.table_stride;
    map.pages = a.table_width;
  }
  return map;
}

// All columns are chosen, in their own order.
template <int kThreads>
__device__ void emit_all(const Arguments& a, long long number, int length) {
  const Map map = map_of(a, number);
  int* out = a.out + number * a.k;
  for (int i = threadIdx.x; i < a.k; i += kThreads) out[i] = i < length ? map(i) : -1;
}

// Writes the k winners, which lie in shared memory in their order.
template <int kThreads>
__device__ void emit(const Arguments& a, long long number, const uint32_t* winners) {
  const Map map = map_of(a, number);
  int* out = a.out + number * a.k;
  if (a.k % 4 == 0 && reinterpret_cast<uintptr_t>(a.out) % 16 == 0) {
    for (int i = threadIdx.x; i < a.k / 4; i += kThreads) {
      const uint4 w = reinterpret_cast<const uint4*>(winners)[i];
      const int x = map(static_cast<int>(w.x)), y = map(static_cast<int>(w.y)), z = map(static_cast<int>(w.z));
      reinterpret_cast<int4*>(out)[i] = make_int4(x, y, z, map(static_cast<int>(w.w)));
    }
  } else {
    for (int i = threadIdx.x; i < a.k; i += kThreads) out[i] = map(static_cast<int>(winners[i]));
  }
}

// ---------------------------------------------------------------------------------------------------------------
// The rank-th element of a set that the block's threads hold between them.

struct alignas(16) Scratch {
  uint32_t bins[2][kBins];  // one is counted in while the other is emptied
  unsigned long long few[kFew];
  uint32_t totals[32];
  uint32_t low[32], high[32];
  uint32_t box[4];
  uint32_t few_count;
};

template <int kThreads>
__device__ __forceinline__ void clear(uint32_t* words, int count) {  // count: a multiple of 4
  for (int i = threadIdx.x; i < count / 4; i += kThreads) reinterpret_cast<uint4*>(words)[i] = make_uint4(0, 0, 0, 0);
}

// Finds the bin that holds the rank-th element, counted from the top. All threads get it; ends with a barrier.
template <int kThreads>
__device__ __forceinline__ void find_bin(Scratch& s, const uint32_t* bins, uint32_t rank, uint32_t& bin,
                                         uint32_t& before, uint32_t& count) {
  constexpr int kOwn = kBins / kThreads;  // neighbouring bins; the first thread has the highest
  static_assert(kOwn == 2 || kOwn % 4 == 0, "loads of 8 or 16 bytes");
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int base = kBins - (static_cast<int>(threadIdx.x) + 1) * kOwn;
  uint32_t own[kOwn], sum = 0;
  if constexpr (kOwn == 2) {
    const uint2 v = *reinterpret_cast<const uint2*>(bins + base);
    own[0] = v.x, own[1] = v.y;
  } else {
#pragma unroll
    for (int i = 0; i < kOwn; i += 4) {
      const uint4 v = *reinterpret_cast<const uint4*>(bins + base + i);
      own[i] = v.x, own[i + 1] = v.y, own[i + 2] = v.z, own[i + 3] = v.w;
    }
  }
#pragma unroll
  for (int i = 0; i < kOwn; ++i) sum += own[i];
  const uint32_t total = __reduce_add_sync(kFull, sum);
  if (lane == 0) s.totals[warp] = total;
  __syncthreads();
  uint32_t ahead = __reduce_add_sync(kFull, lane < warp ? s.totals[lane] : 0u);
  if (ahead < rank && rank <= ahead + total) {
    ahead += warp_inclusive(sum) - sum;
    if (ahead < rank && rank <= ahead + sum) {
#pragma unroll
      for (int i = kOwn - 1; i >= 0; --i) {
        if (ahead < rank && rank <= ahead + own[i]) {
          s.box[0] = base + i;
          s.box[1] = ahead;
          s.box[2] = own[i];
        }
        ahead += own[i];
      }
    }
  }
  __syncthreads();
  bin = s.box[0];
  before = s.box[1];
  count = s.box[2];
}

__device__ __forceinline__ int shift_for(uint32_t span) {
  const int bits = 32 - __clz(span);
  return bits > kBinBits ? bits - kBinBits : 0;
}

// Taken is what has a larger key, or this key and a column before `limit`. With `wanted` > 0 the limit is still open:
// that many of the elements with this key are taken, the first ones.
struct Cut {
  uint32_t key, limit, wanted;
};

// each(use) must call use(key, column, there) for every element that this thread holds. Looks among the keys in
// [low, low + span]; 1 <= rank <= elements there, and fewer unless low is 0. What is not `there` may be counted if its
// key is 0. s.bins[turn] must be empty, and a barrier passed since; so they are afterwards. kPrefix: the first round
// takes all keys by their 11 leading bits. Keys beyond the last bin of a round count in it.
template <int kThreads, bool kPrefix, class Each>
__device__ Cut narrow(Scratch& s, int& turn, Each&& each, uint32_t rank, uint32_t low, uint32_t span, int shift) {
  constexpr int kWarps = kThreads / 32;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  if (threadIdx.x == 0) s.few_count = 0;
  bool first = true, looked = false;
  while (true) {
    const uint32_t* bins = s.bins[turn];
    const SharedWords words(bins);
    if (first) {
      each([&](uint32_t key, uint32_t, bool) {
        const uint32_t distance = key - low;
        if (kPrefix)
          words.count(key >> (32 - kBinBits));
        else if (distance <= span)
          words.count(min(distance >> shift, static_cast<uint32_t>(kBins - 1)));
      });
      first = false;
    } else {
      each([&](uint32_t key, uint32_t, bool) {
        const uint32_t distance = key - low;
        if (distance <= span) words.count(distance >> shift);
      });
    }
    turn ^= 1;
    clear<kThreads>(s.bins[turn], kBins);
    __syncthreads();
    uint32_t bin, before, count;
    find_bin<kThreads>(s, bins, rank, bin, before, count);
    rank -= before;
    const uint32_t step = bin << shift;
    low += step;
    span -= step;
    if (bin < kBins - 1) span = min(span, (1u << shift) - 1u);
    if (count == rank) return Cut{low - 1u, 0, 0};
    if (count <= kFew) break;
    if (span == 0) return Cut{low, 0, rank};
    if (count > kMany && !looked) {  // a plateau, or a range much narrower than the bin
      looked = true;
      uint32_t least = kFull, most = 0;
      each([&](uint32_t key, uint32_t, bool) {
        const uint32_t distance = key - low;
        if (distance <= span) {
          least = min(least, distance);
          most = max(most, distance);
        }
      });
      least = __reduce_min_sync(kFull, least);
      most = __reduce_max_sync(kFull, most);
      if (lane == 0) {
        s.low[warp] = least;
        s.high[warp] = most;
      }
      __syncthreads();
      least = __reduce_min_sync(kFull, lane < kWarps ? s.low[lane] : kFull);
      most = __reduce_max_sync(kFull, lane < kWarps ? s.high[lane] : 0u);
      low += least;
      span = most - least;
      if (span == 0) return Cut{low, 0, rank};
    }
    shift = shift_for(span);
  }
  const SharedWords few_count(&s.few_count);
  each([&](uint32_t key, uint32_t column, bool there) {
    if (key - low <= span && there) s.few[few_count.take(1)] = static_cast<unsigned long long>(key) << 32 | ~column;
  });
  __syncthreads();
  const uint32_t have = s.few_count;
  const unsigned long long mine = lane < have ? s.few[lane] : 0ull;
  for (uint32_t j = warp; j < have; j += kWarps) {
    const unsigned long long one = s.few[j];
    if (__popc(__ballot_sync(kFull, mine > one)) + 1u != rank) continue;
    const uint32_t key = static_cast<uint32_t>(one >> 32);
    const bool left = __any_sync(kFull, mine < one && lane < have && static_cast<uint32_t>(mine >> 32) == key);
    const bool whole = !left && key;  // all with this key are taken
    if (lane == 0) {
      s.box[0] = whole ? key - 1u : key;
      s.box[1] = whole ? 0u : ~static_cast<uint32_t>(one) + 1u;
    }
  }
  __syncthreads();
  return Cut{s.box[0], s.box[1], 0};
}

// As narrow, and closes the limit. Columns are below `length`.
template <int kThreads, bool kPrefix, class Each>
__device__ Cut choose(Scratch& s, Each&& each, uint32_t rank, uint32_t low, uint32_t span, int shift, int length) {
  int turn = 0;
  Cut cut = narrow<kThreads, kPrefix>(s, turn, each, rank, low, span, shift);
  if (cut.wanted) {
    const uint32_t last = static_cast<uint32_t>(length) - 1u;
    const auto equals = [&](auto&& use) {
      each([&](uint32_t key, uint32_t column, bool there) {
        const bool equal = key == cut.key && there;
        use(equal ? ~column : 0u, column, equal);
      });
    };
    cut.limit = ~narrow<kThreads, false>(s, turn, equals, cut.wanted, ~last, last, shift_for(last)).key;
  }
  return cut;
}

// For each vector of this thread: how many of the warp's taken elements stand before it, where columns ascend by
// vector, lane, part and `taken` has a bit for each element. Gives how many the warp has. Only the first `used` vectors
// have any.
template <int kPer, int kVectors>
__device__ __forceinline__ uint32_t count_before(uint32_t taken, int used, uint32_t (&before)[kVectors]) {
  constexpr int kGroup = kVectors < 32 / (kPer * 2) ? kVectors : 32 / (kPer * 2);  // counts that share a word
  constexpr int kField = 32 / kGroup;
  constexpr uint32_t kFieldMask = kFull >> (32 - kField);
  constexpr uint32_t kPart = (1u << kPer) - 1u;
  static_assert(kVectors * kPer <= 32 && kVectors % kGroup == 0 && 32u * kPer <= kFieldMask, "the counts must fit");
  uint32_t sum = 0;
#pragma unroll
  for (int g = 0; g < kVectors; g += kGroup) {
    if (g >= used) break;
    uint32_t mine = 0;
#pragma unroll
    for (int j = 0; j < kGroup; ++j) mine |= __popc(taken >> ((g + j) * kPer) & kPart) << (j * kField & 31);
    const uint32_t inclusive = warp_inclusive(mine);
    const uint32_t all = __shfl_sync(kFull, inclusive, 31);
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
      before[g + j] = sum + ((inclusive - mine) >> (j * kField & 31) & kFieldMask);
      sum += all >> (j * kField & 31) & kFieldMask;
    }
  }
  return sum;
}

// ---------------------------------------------------------------------------------------------------------------
// Path 1: the whole row in registers.

template <class T, int kThreads, int kKeys, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks) resident_rows(const Arguments a) {
  constexpr int kPer = Format<T>::kPer;
  constexpr int kVectors = kKeys / kPer;
  __shared__ Scratch s;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  clear<kThreads>(s.bins[0], kBins);
  wait_for_earlier();
  const Row<T> row = row_of<T>(a, blockIdx.x);
  allow_next();
  if (row.length <= a.k) {
    emit_all<kThreads>(a, row.number, row.length);
    return;
  }
  uint32_t keys[kKeys];
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    const int v = (warp * kVectors + j) * 32 + lane;  // a warp's part of the row is contiguous
    const int column = v * kPer - row.lead;
    if (column >= 0 && column + kPer <= row.length) {
      const uint4 raw = __ldg(reinterpret_cast<const uint4*>(row.first + column));
#pragma unroll
      for (int c = 0; c < kPer; ++c) keys[j * kPer + c] = key_of(Format<T>::part(raw, c));
    } else {
#pragma unroll
      for (int c = 0; c < kPer; ++c) {
        const bool there = static_cast<unsigned>(column + c) < static_cast<unsigned>(row.length);
        keys[j * kPer + c] = there ? key_of(Format<T>::load(row.first + column + c)) : 0u;
      }
    }
  }
  const int own = (warp * kVectors * 32 + lane) * kPer - row.lead;  // column of the first key
  const auto column_of = [](int first, int i) {
    return static_cast<uint32_t>(first + i / kPer * 32 * kPer + i % kPer);
  };
  const auto each = [&](auto&& use) {
    const int first = opaque(own);
#pragma unroll
    for (int i = 0; i < kKeys; ++i)
      use(keys[i], column_of(first, i), column_of(first, i) < static_cast<uint32_t>(row.length));
  };
  __syncthreads();
  const Cut cut = choose<kThreads, true>(s, each, a.k, 0, kFull, 32 - kBinBits, row.length);
  uint32_t taken = 0;
#pragma unroll
  for (int i = 0; i < kKeys; ++i) {
    if (keys[i] > cut.key) taken |= 1u << i;
  }
  if (cut.limit) {
    const int first = opaque(own);
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      if (keys[i] == cut.key && column_of(first, i) < cut.limit) taken |= 1u << i;
    }
  }
  uint32_t before[kVectors];
  const uint32_t sum = count_before<kPer, kVectors>(taken, kVectors, before);
  if (lane == 0) s.low[warp] = sum;  // not s.totals: another warp can still be at it
  __syncthreads();
  const uint32_t ahead = __reduce_add_sync(kFull, lane < warp ? s.low[lane] : 0u);
  uint32_t* winners = s.bins[0];
  const int first = opaque(own);
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    uint32_t place = ahead + before[j];
#pragma unroll
    for (int c = 0; c < kPer; ++c) {
      if (taken >> (j * kPer + c) & 1u) winners[place++] = column_of(first, j * kPer + c);
    }
  }
  __syncthreads();
  emit<kThreads>(a, row.number, winners);
}

// ---------------------------------------------------------------------------------------------------------------
// Paths 2 and 3: a pivot from a sample, one pass that lists what lies above it, an exact choice among those.

// A block that lists: its threads; the vectors of a thread in a stage of its ring; the stages, or none where a thread
// holds all that it looks at; the survivors that a list can take; blocks that should fit on a multiprocessor; the
// vectors of a sample for each thread; whether it is judged first in bins of equal width. That saves a round as a rule,
// but makes `Many` spill registers and lose more than that.
template <int kThreads_, int kAhead_, int kStages_, int kRoom_, int kBlocks_, int kSample_, bool kEven_>
struct Shape {
  static constexpr int kThreads = kThreads_;
  static constexpr int kAhead = kAhead_;
  static constexpr int kStages = kStages_;
  static constexpr uint32_t kRoom = kRoom_;
  static constexpr int kBlocks = kBlocks_;
  static constexpr int kSample = kSample_;
  static constexpr bool kEven = kEven_;
  static constexpr int kRingBytes = kStages * kAhead * kThreads * 16;
};
using Many = Shape<512, 2, 3, 6144, 2, 2, false>;
using Short = Shape<1024, 8, 0, 6144, 1, 1, true>;  // rows that a block can hold
using Held = Shape<512, 8, 0, 6144, 2, 4, true>;    // parts of rows that a block can hold
using Ring = Shape<512, 2, 3, 6144, 2, 4, true>;    // parts of any length
constexpr int kFinishThreads = 1024;
constexpr int kFinishRoom = 8192;

// Memory of a block that does it all. The sample is judged where the list will be, and the choice is made where the
// ring was; in between there is room for a bitmap.
template <class S>
struct alignas(16) Whole {
  static constexpr int kList = static_cast<int>(sizeof(uint2) * S::kRoom);
  static constexpr int kScratch = static_cast<int>(sizeof(Scratch));
  static constexpr int kBitmap = kList + (S::kRingBytes > kScratch ? S::kRingBytes - kScratch : 0);
  static_assert(kList >= kScratch, "the sample must fit");
  unsigned char bytes[kBitmap + kScratch];
  __device__ uint2* list() { return reinterpret_cast<uint2*>(bytes); }
  __device__ Scratch& early() { return *reinterpret_cast<Scratch*>(bytes); }
  __device__ unsigned char* ring() { return bytes + kList; }
  __device__ uint32_t* bitmap() { return reinterpret_cast<uint32_t*>(bytes); }
  __device__ Scratch& late() { return *reinterpret_cast<Scratch*>(bytes + kBitmap); }
};

// Memory of a block that lists a part of a row.
template <class S>
struct alignas(16) Part {
  Scratch s;
  unsigned char ring[S::kRingBytes ? S::kRingBytes : 16];
};

struct Pivot {
  uint32_t key;   // listed is what has a larger one
  uint32_t top;   // the sample's largest
  bool plateau;   // much of the sample has just this key
};

// Memory of a block that finishes a row whose parts were listed.
struct alignas(16) Last {
  uint2 list[kFinishRoom];
  Scratch s;
  uint32_t kept;
  uint32_t next;
};

__device__ __forceinline__ uint32_t mix(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return x ^ (x >> 16);
}


// The vectors of a part of a row that lie in the window as a whole.
template <class T>
struct Inner {
  int from, to;  // empty if to <= from
  bool ragged_first, ragged_last;

  __device__ Inner(const Row<T>& row, int part_from, int part_to) {
    ragged_first = part_from == 0 && part_from < part_to && row.lead != 0;
    ragged_last = part_to == row.vectors() && part_from < part_to && (row.lead + row.length) % Row<T>::kPer != 0;
    from = part_from + (ragged_first ? 1 : 0);
    to = part_to - (ragged_last ? 1 : 0);
    if (ragged_first && part_to - part_from == 1) ragged_last = false;  // it is the same vector
  }
};

// Whole vectors are sampled, for what one of their elements costs, spread by a fixed hash, so that a period in the
// scores cannot hide.
template <class T, class S>
struct Sample {
  static constexpr int kPer = Format<T>::kPer;
  int vectors;  // a power of two, or none
  uint4 raw[S::kSample];

  // Only starts the loads.
  __device__ __forceinline__ explicit Sample(const Row<T>& row) {
    const Inner<T> inner(row, 0, row.vectors());
    const int there = inner.to - inner.from;
    const int length = row.length;
    const int wanted = length <= 65536 ? 1024 : length <= 196608 ? 2048 : length <= 393216 ? 4096 : 8192;
    vectors = min(wanted / kPer, S::kSample * S::kThreads);
    int shift = 31 - __clz(vectors);
    if (there < vectors) {
      shift = there < 1 ? 0 : 31 - __clz(there);
      vectors = there < 1 ? 0 : 1 << shift;
    }
    const uint32_t step = static_cast<uint32_t>(there) >> shift;
#pragma unroll
    for (int u = 0; u < S::kSample; ++u) {
      const int i = u * S::kThreads + static_cast<int>(threadIdx.x);
      raw[u] = make_uint4(0, 0, 0, 0);
      if (i < vectors)
        raw[u] = __ldg(
            row.vector(inner.from + static_cast<int>(static_cast<uint32_t>(i) * step + __umulhi(mix(i), step))));
    }
  }
  // Calls use(score) for the elements that this thread has.
  template <class F>
  __device__ __forceinline__ void each(F&& use) const {
#pragma unroll
    for (int u = 0; u < S::kSample; ++u) {
      if (u * S::kThreads + static_cast<int>(threadIdx.x) < vectors) {
#pragma unroll
        for (int c = 0; c < kPer; ++c) use(Format<T>::part(raw[u], c));
      }
    }
  }
};

// A pivot for the row. s.bins[0] must be empty; a barrier comes first.
template <class T, class S>
__device__ Pivot propose(const Arguments& a, const Row<T>& row, const Sample<T, S>& sample, Scratch& s, uint32_t room) {
  constexpr int kThreads = S::kThreads;
  constexpr int kWarps = kThreads / 32;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const uint32_t samples = sample.vectors * Format<T>::kPer;
  const float share = static_cast<float>(samples) / row.length;
  const float expected = share * a.k;
  uint32_t rank = static_cast<uint32_t>(expected + 5.0f * sqrtf(expected)) + 2;
  if (a.sample_rank) rank = a.sample_rank;
  rank = min(rank, samples);
  const uint32_t enough = rank + rank / 16 + 2;  // of the sample at or above the pivot
  const uint32_t plenty = max(enough, static_cast<uint32_t>(share * (room - room / 4)));
  if (!samples) {
    __syncthreads();
    return Pivot{0, 0, false};  // lists nothing: the row is short
  }
  uint32_t most = 0;
  uint32_t low = 0, before = 0;
  int shift = 32 - kBinBits, turn = 0;
  Pivot pivot;
  if constexpr (S::kEven) {
    // From the least of the threads' largest to the largest of all, where the rank lies as a rule.
    sample.each([&](float x) { most = max(most, key_of(x)); });
    uint32_t least = most ? most : kFull;
    most = __reduce_max_sync(kFull, most);
    least = __reduce_min_sync(kFull, least);
    if (lane == 0) {
      s.high[warp] = most;
      s.low[warp] = least;
    }
    __syncthreads();
    pivot.top = most = __reduce_max_sync(kFull, lane < kWarps ? s.high[lane] : 0u);
    least = __reduce_min_sync(kFull, lane < kWarps ? s.low[lane] : kFull);
    const float bottom = value_of(least), width = (value_of(most) - bottom) * (1.0f / kBins), scale = 1.0f / width;
    // As many as there are threads with a sample count; neither the scale nor a product may overflow. NaN fails too.
    if (least > kLowest && most < kHighest && width > 1e-37f && width < 1e34f &&
        rank <= static_cast<uint32_t>(min(sample.vectors, kThreads))) {
      const SharedWords words(s.bins[0]);
      sample.each([&](float x) {
        const float at = (x - bottom) * scale;
        if (at >= 0.0f) words.count(min(static_cast<uint32_t>(min(at, 4096.0f)), static_cast<uint32_t>(kBins - 1)));
      });
      clear<kThreads>(s.bins[1], kBins);
      __syncthreads();
      uint32_t bin, ahead, count;
      find_bin<kThreads>(s, s.bins[0], rank, bin, ahead, count);
      if (ahead + count <= enough) {
        pivot.key = key_of(bottom + bin * width);
        pivot.plateau = false;
        if (pivot.key == kMinusZero) --pivot.key;
        return pivot;
      }
      turn = 1;
    }
    const SharedWords first(s.bins[turn]);
    sample.each([&](float x) { first.count(key_of(x) >> (32 - kBinBits)); });
  } else {
    __syncthreads();
    const SharedWords first(s.bins[0]);
    sample.each([&](float x) {
      const uint32_t key = key_of(x);
      most = max(most, key);
      first.count(key >> (32 - kBinBits));
    });
    most = __reduce_max_sync(kFull, most);
    if (lane == 0) s.high[warp] = most;
  }
  while (true) {
    uint32_t bin, ahead, count;
    clear<kThreads>(s.bins[turn ^ 1], kBins);
    __syncthreads();
    find_bin<kThreads>(s, s.bins[turn], rank - before, bin, ahead, count);
    before += ahead;
    low += bin << shift;
    if (before + count <= enough || shift == 0) {
      pivot.plateau = before + count > plenty || !low;
      pivot.key = pivot.plateau ? low : low - 1u;
      break;
    }
    const uint32_t span = (1u << shift) - 1u;
    shift = max(shift - kBinBits, 0);
    turn ^= 1;
    const SharedWords words(s.bins[turn]);
    sample.each([&](float x) {
      const uint32_t distance = key_of(x) - low;
      if (distance <= span) words.count(distance >> shift);
    });
  }
  if constexpr (!S::kEven) pivot.top = __reduce_max_sync(kFull, lane < kWarps ? s.high[lane] : 0u);
  // No score has this key, and its value compares like 0.0; the next lower one lets the same scores pass.
  if (pivot.key == kMinusZero) --pivot.key;
  return pivot;
}

// The ring: stages that are filled in turn. Each thread copies what it will look at itself, so no barrier is needed.
template <class T, class S>
struct Stages {
  static constexpr int kStride = S::kThreads * Row<T>::kPer;  // columns between a thread's vectors
  const uint4* own;      // this thread's first vector
  SharedVectors target;  // the same
  const T* next;   // what it copies next
  int left;        // vectors from there to the end of the part
  int stage;       // to copy into, in vectors

  __device__ Stages(const Row<T>& row, const Inner<T>& inner, unsigned char* memory)
      : own(reinterpret_cast<const uint4*>(memory) + threadIdx.x), target(own) {
    const int v = inner.from + static_cast<int>(threadIdx.x);
    next = row.first + (static_cast<long long>(v) * Row<T>::kPer - row.lead);
    left = inner.to - v;
    stage = 0;
  }
  static __device__ __forceinline__ int after(int stage) {
    return stage == (S::kStages - 1) * S::kAhead * S::kThreads ? 0 : stage + S::kAhead * S::kThreads;
  }
  template <int kFrom>
  __device__ __forceinline__ void copy_vectors() {
    if constexpr (kFrom < S::kAhead) {
      if (left > kFrom * S::kThreads)
        target.template copy<kFrom * S::kThreads>(stage, next);
      copy_vectors<kFrom + 1>();
    }
  }
  __device__ __forceinline__ void copy() {
    copy_vectors<0>();
    copy_group();
    left -= S::kAhead * S::kThreads;
    next += S::kAhead * kStride;
    stage = after(stage);
  }
  __device__ __forceinline__ void copy_first() {
#pragma unroll
    for (int r = 0; r < S::kStages - 1; ++r) copy();
  }
};

// Appends hits to the list, of which the counter tells more than fits once it has overflowed. `hits` has a bit for each
// element that this thread looks at, at(i) tells how many columns the i-th stands behind the first, value(e) gives the
// score there.
template <class At, class Value>
__device__ __forceinline__ void append(uint32_t hits, int column, At&& at, Value&& value, uint2* list, uint32_t room,
                                       const SharedWords& counter) {
  if (!hits) return;
  const uint32_t count = __popc(hits);
  const uint32_t end = counter.take(count) + count;
  if (end > room) return;
  uint2* place = list + (end - count);
  while (hits) {
    const uint32_t i = 31u - __clz(hits);
    hits ^= 1u << i;
    const uint32_t e = at(i);
    *place++ = make_uint2(__float_as_uint(value(e)), column + e);
  }
}

// The bits of the elements above the bar, the first one lowest; NaN is never above.
template <class T, int kVectors, class Load>
__device__ __forceinline__ uint32_t above(float bar, Load&& load) {
  constexpr int kPer = Format<T>::kPer;
  static_assert(kVectors * kPer <= 32, "a word has a bit for each");
  uint32_t hits = 0;
#pragma unroll
  for (int u = kVectors - 1; u >= 0; --u) {
    const uint4 raw = load(u);
#pragma unroll
    for (int c = kPer - 1; c >= 0; --c)  // the sign of a difference is exact
      hits = __funnelshift_l(__float_as_uint(__fsub_rn(bar, Format<T>::part(raw, c))), hits, 1);
  }
  return hits;
}

// Only vectors at which `left` allows count: a thread's u-th one is u * kThreads further.
template <int kPer, int kThreads, int kVectors>
__device__ __forceinline__ uint32_t only(uint32_t hits, int left) {
#pragma unroll
  for (int u = 0; u < kVectors; ++u) {
    if (left <= u * kThreads) hits &= ~((kFull >> (32 - kPer)) << (u * kPer));
  }
  return hits;
}

// Lists the elements of a part of a row above the pivot, in any order; `kept` (0 before, a barrier passed since) counts
// also those that did not fit. The memory works from the construction on.
template <class T, class S>
struct Lister {
  static constexpr int kPer = Format<T>::kPer;
  static constexpr int kStride = S::kThreads * kPer;
  static constexpr int kHeld = S::kStages ? 1 : 32 / kPer;
  const Row<T>& row;
  const Inner<T> inner;
  const int from, to;
  Stages<T, S> ring;
  uint4 held[kHeld];

  __device__ __forceinline__ Lister(const Row<T>& r, int part_from, int part_to, unsigned char* memory)
      : row(r), inner(r, part_from, part_to), from(part_from), to(part_to), ring(r, inner, memory) {
    if constexpr (S::kStages != 0) {
      ring.copy_first();
    } else {
#pragma unroll
      for (int u = 0; u < kHeld; ++u) {
        held[u] = make_uint4(0, 0, 0, 0);
        if (ring.left > u * S::kThreads) held[u] = __ldg(reinterpret_cast<const uint4*>(ring.next + u * kStride));
      }
    }
  }

  // Ends with a barrier.
  __device__ __forceinline__ void list(uint32_t pivot, uint2* list, uint32_t& kept) {
    const bool usable = pivot >= kLowest && pivot <= kHighest;
    const float bar = __uint_as_float(opaque(__float_as_uint(value_of(usable ? pivot : kHighest))));
    const SharedWords counter(&kept);
    const int first = inner.from + static_cast<int>(threadIdx.x);
    int column = first * kPer - row.lead;
    int left = inner.to - first;  // this thread's vectors lie below it
    const auto at = [](uint32_t i) { return i + i / kPer * (kStride - kPer); };
    if constexpr (S::kStages == 0) {
      const uint32_t hits = above<T, kHeld>(bar, [&](int u) { return held[u]; });
      append(only<kPer, S::kThreads, kHeld>(hits, left), column, at,
             [&](uint32_t e) { return Format<T>::load(row.first + (column + static_cast<int>(e))); }, list, S::kRoom,
             counter);
    } else {
      int all = inner.to - inner.from, stage = 0;
      for (; all > 0; all -= S::kAhead * S::kThreads) {
        ring.copy();
        copy_wait<S::kStages - 1>();
        const uint4* mine = ring.own + stage;
        uint32_t hits = above<T, S::kAhead>(bar, [&](int u) { return mine[u * S::kThreads]; });
        if (all < S::kAhead * S::kThreads) hits = only<kPer, S::kThreads, S::kAhead>(hits, left);
        append(hits, column, at, [&](uint32_t e) { return Format<T>::stored(mine, e); }, list, S::kRoom, counter);
        stage = Stages<T, S>::after(stage);
        column += S::kAhead * kStride;
        left -= S::kAhead * S::kThreads;
      }
      copy_wait<0>();
    }
    const auto single = [&](float x, int c) {
      if (x > bar) {
        const uint32_t place = counter.take(1);
        if (place < S::kRoom) list[place] = make_uint2(__float_as_uint(x), static_cast<uint32_t>(c));
      }
    };
    if (threadIdx.x == 0 && inner.ragged_first) row.visit(from, single);
    if (threadIdx.x == 32 && inner.ragged_last) row.visit(to - 1, single);
    if (threadIdx.x == 64 && !usable) counter.take(0x40000000u);  // no bar stands for such a pivot
    __syncthreads();
  }
};

// A part of a row in a block's registers. Each warp has a contiguous piece of it, so that the list comes out by column.
template <class T, class S>
struct Piece {
  static constexpr int kPer = Format<T>::kPer;
  static constexpr int kVectors = 32 / kPer;
  int column;  // of this thread's first vector; each further one is 32 vectors on
  int used;    // vectors of a thread, the same for all
  uint4 held[kVectors];

  __device__ __forceinline__ Piece(const Row<T>& row, int from, int to)
      : used((to - from + S::kThreads - 1) / S::kThreads) {
    const int v = from + static_cast<int>(threadIdx.x >> 5) * used * 32 + static_cast<int>(threadIdx.x & 31);
    column = v * kPer - row.lead;
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      held[u] = make_uint4(kFull, kFull, kFull, kFull);  // NaN
      if (u < used && v + u * 32 < to) held[u] = row.whole(v + u * 32);
    }
  }

  // Bits of the elements above the pivot.
  __device__ __forceinline__ uint32_t above_pivot(uint32_t pivot) const {
    const float bar = value_of(pivot);
    uint32_t hits = 0;
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      if (u < used) hits |= above<T, 1>(bar, [&](int) { return held[u]; }) << (u * kPer);
    }
    return hits;
  }
  // Bits of the first k elements equal to the pivot.
  __device__ __forceinline__ uint32_t first_equal(uint32_t pivot, uint32_t k, uint32_t* totals) const {
    const float bar = value_of(pivot);
    uint32_t hits = 0;
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
#pragma unroll
      for (int c = 0; c < kPer; ++c) hits |= (Format<T>::part(held[u], c) == bar ? 1u : 0u) << (u * kPer + c);
    }
    uint32_t first = 0;
    place(hits, totals, [&](uint32_t at, int i, uint2) { first |= at < k ? 1u << i : 0u; });
    return first;
  }
  // Calls put(place, i, entry) for each hit of this thread, which knows its i-th element: by column it has this place
  // among the block's. Gives how many the block has.
  template <class F>
  __device__ __forceinline__ uint32_t place(uint32_t hits, uint32_t* totals, F&& put) const {
    constexpr int kWarps = S::kThreads / 32;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    uint32_t before[kVectors];
    const uint32_t sum = count_before<kPer, kVectors>(hits, used, before);
    if (lane == 0) totals[warp] = sum;
    __syncthreads();
    const uint32_t sums = lane < kWarps ? totals[lane] : 0u;
    const uint32_t ahead = __reduce_add_sync(kFull, lane < warp ? sums : 0u);
    const uint32_t all = __reduce_add_sync(kFull, sums);
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      uint32_t own = hits >> (u * kPer) & ((1u << kPer) - 1u);
      if (u < used) {
        uint32_t at = ahead + before[u];
        while (own) {  // rarely more than one
          const int c = __ffs(own) - 1;
          own &= own - 1;
          put(at++, u * kPer + c, make_uint2(__float_as_uint(Format<T>::part(held[u], c)), column + u * 32 * kPer + c));
        }
      }
    }
    return all;
  }
};

// ---------------------------------------------------------------------------------------------------------------
// Where the sample misled.

// Lists what has a larger key than the pivot.
template <class T, int kThreads>
__device__ void list_again(const Row<T>& row, uint32_t pivot, uint2* list, uint32_t room, uint32_t& kept) {
  __syncthreads();
  if (threadIdx.x == 0) kept = 0;
  __syncthreads();
  for (int v = threadIdx.x; v < row.vectors(); v += kThreads) {
    row.visit(v, [&](float x, int column) {
      if (key_of(x) > pivot) {
        const uint32_t place = atomicAdd(&kept, 1u);
        if (place < room) list[place] = make_uint2(__float_as_uint(x), static_cast<uint32_t>(column));
      }
    });
  }
  __syncthreads();
}

// Finds, by counting over the whole row, a pivot that is certain to do: at most `room` elements above it, at least k
// above or equal. Reads the row once for every 11 bits, three times at most.
template <class T, int kThreads>
__device__ uint32_t search(uint32_t k, const Row<T>& row, Scratch& s, uint32_t room) {
  const int vectors = row.vectors();
  uint32_t low = 0, span = kFull, rank = k, above = 0;
  while (true) {
    const int shift = shift_for(span);
    __syncthreads();
    clear<kThreads>(s.bins[0], kBins);
    __syncthreads();
    for (int v = threadIdx.x; v < vectors; v += kThreads) {
      row.visit(v, [&](float x, int) {
        const uint32_t distance = key_of(x) - low;
        if (distance <= span) atomicAdd(&s.bins[0][distance >> shift], 1u);
      });
    }
    __syncthreads();
    uint32_t bin, before, count;
    find_bin<kThreads>(s, s.bins[0], rank, bin, before, count);
    above += before;
    rank -= before;
    const uint32_t step = bin << shift;
    low += step;
    if (shift == 0) return low;
    if (above + count <= room && low) return low - 1u;
    span = min((1u << shift) - 1u, span - step);
  }
}

// Adds to the list, which holds `already`, the first `wanted` elements equal to the pivot, by column, as far as there
// are that many, which it tells. Ends with a barrier.
template <class T, int kThreads>
__device__ bool list_equal(const Row<T>& row, uint32_t pivot, uint32_t already, uint32_t wanted, Scratch& s,
                           uint2* list) {
  constexpr int kPer = Format<T>::kPer;
  constexpr int kWarps = kThreads / 32;
  constexpr int kTile = 4;  // vectors of a lane in a tile; a warp's part of a tile is contiguous
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int vectors = row.vectors();
  const uint32_t bits = __float_as_uint(pivot ? value_of(pivot) : __uint_as_float(0x7FFFFFFFu));
  uint32_t found = 0;
  for (int base = 0; base < vectors && found < wanted; base += kThreads * kTile) {
    uint32_t hits[kTile], before[kTile], mine = 0;
#pragma unroll
    for (int u = 0; u < kTile; ++u) {
      hits[u] = 0;
      const int v = base + (warp * kTile + u) * 32 + lane;
      if (v < vectors)
        row.visit(v, [&](float x, int column) {
          if (key_of(x) == pivot) hits[u] |= 1u << (column + row.lead - v * kPer);
        });
      const uint32_t inclusive = warp_inclusive(__popc(hits[u]));
      before[u] = mine + inclusive - __popc(hits[u]);
      mine += __shfl_sync(kFull, inclusive, 31);
    }
    __syncthreads();
    if (lane == 0) s.totals[warp] = mine;
    __syncthreads();
    const uint32_t sums = warp_inclusive(lane < kWarps ? s.totals[lane] : 0u);
    const uint32_t total = __shfl_sync(kFull, sums, 31);
    const uint32_t offset = warp > 0 ? __shfl_sync(kFull, sums, warp - 1) : 0u;
#pragma unroll
    for (int u = 0; u < kTile; ++u) {
      const int v = base + (warp * kTile + u) * 32 + lane;
      uint32_t rank = found + offset + before[u];
      for (uint32_t rest = hits[u]; rest && rank < wanted; rest &= rest - 1, ++rank)
        list[already + rank] = make_uint2(bits, static_cast<uint32_t>(v * kPer - row.lead + __ffs(rest) - 1));
    }
    found += total;
  }
  __syncthreads();
  return found >= wanted;
}

// Brings the list to between k and `room` elements that hold the winners; gives the pivot. Ends with a barrier.
template <class T, int kThreads>
__device__ uint32_t settle(uint32_t k, const Row<T>& row, uint32_t pivot, Scratch& s, uint2* list, uint32_t room,
                           uint32_t& kept) {
  bool counted = false;  // the pivot comes from counts, not from the sample
  while (kept < k || kept > room) {
    const uint32_t have = kept;
    // The k-th score can be the pivot itself: all that is listed, and the first ones equal to it.
    if (have < k && list_equal<T, kThreads>(row, pivot, have, k - have, s, list)) {
      if (threadIdx.x == 0) kept = k;
      __syncthreads();
      break;
    }
    if (counted) __trap();  // counts cannot mislead
    counted = true;
    pivot = search<T, kThreads>(k, row, s, room);
    list_again<T, kThreads>(row, pivot, list, room, kept);
  }
  return pivot;
}

// ---------------------------------------------------------------------------------------------------------------
// The choice among the listed.

// The listed in the registers of a block.
template <int kThreads_, int kSlots>
struct Survivors {
  static constexpr int kThreads = kThreads_;
  static constexpr int kWarps = kThreads / 32;
  uint32_t keys[kSlots], columns[kSlots];  // an empty slot has no column, and the key of none
  uint32_t filled;                         // slot j is empty in all threads unless this exceeds j * kThreads

  __device__ __forceinline__ explicit Survivors(uint32_t slots) : filled(slots * kThreads) {}
  // `kept` of them from shared memory.
  __device__ __forceinline__ Survivors(const uint2* list, uint32_t kept) : filled(kept) {
#pragma unroll
    for (int j = 0; j < kSlots; ++j) {
      const uint32_t i = j * kThreads + threadIdx.x;
      keys[j] = 0;
      columns[j] = kFull;
      if (i < kept) {
        const uint2 entry = list[i];
        keys[j] = key_of(__uint_as_float(entry.x));
        columns[j] = entry.y;
      }
    }
  }
  // get(j, bits, column) sets both if this thread has a j-th one.
  template <class Get>
  __device__ __forceinline__ void load(Get&& get) {
#pragma unroll
    for (int j = 0; j < kSlots; ++j) {  // all loads before their first use
      keys[j] = columns[j] = kFull;  // NaN
      if (static_cast<uint32_t>(j * kThreads) < filled) get(j, keys[j], columns[j]);
    }
#pragma unroll
    for (int j = 0; j < kSlots; ++j) keys[j] = key_of(__uint_as_float(keys[j]));
  }
  // Calls use(j) for the slots in use.
  template <class F>
  __device__ __forceinline__ void slots(F&& use) const {
#pragma unroll
    for (int j = 0; j < kSlots; ++j) {
      if (static_cast<uint32_t>(j * kThreads) < filled) use(j);
    }
  }
  // The k best of `kept`, all of which lie above the pivot or are exactly the winners. s.bins[0] must be empty, and a
  // barrier passed since. kClosed: the limit too.
  template <bool kClosed>
  __device__ __forceinline__ Cut cut(const Arguments& a, int length, uint32_t kept, const Pivot& pivot,
                                     Scratch& s) const {
    if (kept <= static_cast<uint32_t>(a.k)) return Cut{0, static_cast<uint32_t>(length), 0};
    const uint32_t low = pivot.key + 1u;
    const auto each = [&](auto&& use) { slots([&](int j) { use(keys[j], columns[j], columns[j] != kFull); }); };
    const int shift = shift_for(pivot.top > low ? pivot.top - low : 0u);
    if (kClosed) return choose<kThreads, false>(s, each, a.k, low, kFull - low, shift, length);
    int turn = 0;
    return narrow<kThreads, false>(s, turn, each, a.k, low, kFull - low, shift);
  }

  // Writes the winners, whatever the order of the list. `bitmap`, `words` words up to `s`, may lie where the list is.
  __device__ void write(const Arguments& a, long long number, int length, uint32_t kept, const Pivot& pivot,
                        uint32_t* bitmap, int words, Scratch& s) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const Cut last = cut<true>(a, length, kept, pivot, s);
    slots([&](int j) {  // only the taken keep their column
      if (!(keys[j] > last.key || (keys[j] == last.key && columns[j] < last.limit))) columns[j] = kFull;
    });
    // A winner's place: the winners in the groups of 64 columns before its own, and those before it in its own.
    uint32_t* winners = s.bins[0];
    uint32_t done = 0;
    const int most = words / 3;
    const uint2* groups = reinterpret_cast<const uint2*>(bitmap);
    uint32_t* ahead = bitmap + most * 2;
    for (int window = 0; window < length; window += most * 64) {
      const int count = min((length - window + 63) / 64, most);
      const uint32_t here = static_cast<uint32_t>(count) * 64u;
      __syncthreads();
      clear<kThreads>(bitmap, (count * 2 + 3) / 4 * 4);
      __syncthreads();
      slots([&](int j) {
        const uint32_t place = columns[j] - static_cast<uint32_t>(window);
        if (columns[j] != kFull && place < here) atomicOr(&bitmap[place >> 5], 1u << (place & 31));
      });
      __syncthreads();
      const int own = (count + kThreads - 1) / kThreads;
      const int from = min(static_cast<int>(threadIdx.x) * own, count), to = min(from + own, count);
      uint32_t sum = 0;
      for (int g = from; g < to; ++g) sum += __popc(groups[g].x) + __popc(groups[g].y);
      const uint32_t inclusive = warp_inclusive(sum);
      if (lane == 31) s.high[warp] = inclusive;
      __syncthreads();
      const uint32_t sums = lane < kWarps ? s.high[lane] : 0u;
      uint32_t before = done + __reduce_add_sync(kFull, lane < warp ? sums : 0u) + inclusive - sum;
      done += __reduce_add_sync(kFull, sums);
      for (int g = from; g < to; ++g) {
        ahead[g] = before;
        before += __popc(groups[g].x) + __popc(groups[g].y);
      }
      __syncthreads();
      slots([&](int j) {
        const uint32_t place = columns[j] - static_cast<uint32_t>(window);
        if (columns[j] != kFull && place < here) {
          const uint2 group = groups[place >> 6];
          const uint32_t below = (1u << (place & 31)) - 1u;
          const uint32_t inside = place & 32 ? __popc(group.x) + __popc(group.y & below) : __popc(group.x & below);
          winners[ahead[place >> 6] + inside] = columns[j];
        }
      });
    }
    __syncthreads();
    emit<kThreads>(a, number, winners);
  }

  // The same where columns ascend by warp, slot, lane: a winner's place is the number of winners before it, and of
  // equal scores the first ones win. With `wanted` > 0 those
  // above the pivot do, and that many equal to it.
  __device__ void write_in_order(const Arguments& a, long long number, int length, uint32_t kept, const Pivot& pivot,
                                 uint32_t wanted, Scratch& s) const {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const Cut edge = wanted ? Cut{pivot.key, 0, wanted} : cut<false>(a, length, kept, pivot, s);
    const auto above = [&](int j) {
      return __ballot_sync(kFull, keys[j] > edge.key || (keys[j] == edge.key && columns[j] < edge.limit));
    };
    const auto equal = [&](int j) { return __ballot_sync(kFull, edge.wanted && keys[j] == edge.key); };
    uint32_t sum = 0;  // two counts
    slots([&](int j) { sum += __popc(above(j)) + (__popc(equal(j)) << 16); });
    if (lane == 0) s.totals[warp] = sum;
    const Map map = map_of(a, number);
    __syncthreads();
    const uint32_t before = __reduce_add_sync(kFull, lane < warp ? s.totals[lane] : 0u);
    uint32_t over = before & 0xFFFFu, same = before >> 16;
    int* out = a.out + number * a.k;
    slots([&](int j) {
      const uint32_t below = (1u << lane) - 1u, best = above(j), tied = equal(j);
      const uint32_t ties = same + __popc(tied & below);
      const uint32_t place = over + __popc(best & below) + min(ties, edge.wanted);
      if ((best >> lane & 1u) || ((tied >> lane & 1u) && ties < edge.wanted))
        out[place] = map(static_cast<int>(columns[j]));
      over += __popc(best);
      same += __popc(tied);
    });
  }
};

// Path 2: a block does it all.
template <class T, class S>
__global__ void __launch_bounds__(S::kThreads, S::kBlocks) stream_rows(const Arguments a) {
  constexpr int kThreads = S::kThreads;
  using M = Whole<S>;
  M& m = *reinterpret_cast<M*>(dynamic_memory());
  Scratch& s = m.late();
  __shared__ uint32_t kept;
  wait_for_earlier();
  const Row<T> row = row_of<T>(a, blockIdx.x);
  allow_next();
  if (row.length <= a.k) {
    emit_all<kThreads>(a, row.number, row.length);
    return;
  }
  Lister<T, S> lister(row, 0, row.vectors(), m.ring());
  const Sample<T, S> sample(row);
  clear<kThreads>(m.early().bins[0], kBins);
  if (threadIdx.x == 0) kept = 0;
  Pivot pivot = propose<T, S>(a, row, sample, m.early(), S::kRoom);
  __syncthreads();  // the sample's memory becomes the list
  lister.list(pivot.key, m.list(), kept);
  if (kept < static_cast<uint32_t>(a.k) || kept > S::kRoom)
    pivot.key = settle<T, kThreads>(a.k, row, pivot.key, s, m.list(), S::kRoom, kept);
  clear<kThreads>(s.bins[0], kBins);
  __syncthreads();
  Survivors<kThreads, (S::kRoom + kThreads - 1) / kThreads>(m.list(), kept)
      .write(a, row.number, row.length, kept, pivot, m.bitmap(), M::kBitmap / 4, s);
}

// What a block of the filter leaves for its row.
struct Head {
  uint32_t kept;
  uint32_t merged;  // on a plateau: a second list, which also has the first k equal to the pivot
  uint32_t pivot, top;
};

// Path 3: blocks list the parts of a row,
template <class T, class S>
__global__ void __launch_bounds__(S::kThreads, S::kBlocks) filter_rows(const Arguments a, int split, uint32_t inverse) {
  Part<S>& m = *reinterpret_cast<Part<S>*>(dynamic_memory());
  __shared__ uint32_t kept;
  const long long number = blockIdx.x / split;
  const int part = blockIdx.x % split;
  Head* heads = static_cast<Head*>(a.workspace);
  uint2* list = reinterpret_cast<uint2*>(heads + a.rows * split) + static_cast<long long>(blockIdx.x) * S::kRoom;
  clear<S::kThreads>(m.s.bins[0], kBins);
  if (threadIdx.x == 0) kept = 0;
  wait_for_earlier();
  const Row<T> row = row_of<T>(a, number);
  allow_next();
  if (row.length <= a.k) {  // the finishing kernel needs nothing here
    if (threadIdx.x == 0) heads[blockIdx.x] = Head{0, 0, 0, 0};
    return;
  }
  const int vectors = row.vectors();
  // Parts of a ring are a vector longer than a fair share: parts that begin at multiples of a large power of two, as
  // those of rows of 2^n columns do, are read more slowly.
  const int fair = split == 1 ? vectors : static_cast<int>(__umulhi(vectors + split - 1, inverse));
  const int share = fair + (S::kStages ? 1 : 0);
  const int from = min(part * share, vectors), to = min(from + share, vectors);
  const Sample<T, S> sample(row);
  Pivot pivot;
  uint32_t found, merged = 0;
  if constexpr (S::kStages == 0) {
    const Piece<T, S> piece(row, from, to);
    pivot = propose<T, S>(a, row, sample, m.s, kFinishRoom);
    if (pivot.key >= kLowest && pivot.key <= kHighest) {
      const uint32_t hits = piece.above_pivot(pivot.key);
      found = piece.place(hits, m.s.low, [&](uint32_t at, int, uint2 entry) {
        if (at < S::kRoom) list[at] = entry;
      });
      if (pivot.plateau && found < static_cast<uint32_t>(a.k)) {
        const uint32_t first = piece.first_equal(pivot.key, a.k, m.s.high);
        merged = piece.place(hits | first, m.s.totals, [&](uint32_t at, int, uint2 entry) { list[kMaxK + at] = entry; });
      }
    } else {
      found = kFull;  // no score stands for such a pivot
    }
  } else {
    Lister<T, S> lister(row, from, to, m.ring);
    pivot = propose<T, S>(a, row, sample, m.s, kFinishRoom);
    lister.list(pivot.key, list, kept);
    found = kept;
  }
  if (threadIdx.x == 0) heads[blockIdx.x] = Head{found, merged, pivot.key, pivot.top};
}

// What the parts of a row have listed, fetched in blocks of 32, none of which holds two parts'.
struct Parts {
  bool wide;           // more than 32 parts
  uint32_t counts[2];  // of the parts: this lane's, and the one 32 further
  uint32_t ends[2];    // blocks up to the end of each
  uint32_t blocks, total;

  __device__ __forceinline__ Parts(uint32_t first, uint32_t second, int split)
      : wide(split > 32), counts{first, second} {
    ends[0] = warp_inclusive((first + 31) / 32);
    blocks = __shfl_sync(kFull, ends[0], 31);
    ends[1] = blocks;
    if (wide) {
      ends[1] += warp_inclusive((second + 31) / 32);
      blocks = __shfl_sync(kFull, ends[1], 31);
    }
    total = __reduce_add_sync(kFull, first + second);
  }
  // Whether this lane has one in block b, of which part, and the how manieth there.
  __device__ __forceinline__ bool find(uint32_t b, uint32_t& part, uint32_t& i) const {
    part = __popc(__ballot_sync(kFull, ends[0] <= b));
    bool late = false;
    if (wide) {
      part += __popc(__ballot_sync(kFull, ends[1] <= b));
      late = part >= 32;
    }
    const uint32_t count = __shfl_sync(kFull, late ? counts[1] : counts[0], part & 31);
    i = (b - __shfl_sync(kFull, late ? ends[1] : ends[0], part & 31) + (count + 31) / 32) * 32 + (threadIdx.x & 31);
    return b < blocks && i < count;
  }
};

// What the blocks of a row left.
template <class S>
struct Left {
  const Head* heads;
  const uint2* lists;
  __device__ __forceinline__ Left(const Arguments& a, int split)
      : heads(static_cast<const Head*>(a.workspace)), lists(reinterpret_cast<const uint2*>(heads + a.rows * split)) {
    heads += static_cast<long long>(blockIdx.x) * split;
    lists += static_cast<long long>(blockIdx.x) * split * S::kRoom;
  }
};

// The rest of finish_rows where the sample misled, out of line.
template <class T, class S>
__attribute__((noinline)) __device__ void finish_anyhow(const Arguments& a, int split, Last& m) {
  constexpr int kThreads = kFinishThreads;
  constexpr int kWarps = kThreads / 32;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const Left<S> left(a, split);
  const uint32_t first = lane < split ? left.heads[lane].kept : 0u;
  const uint32_t second = lane + 32 < split ? left.heads[lane + 32].kept : 0u;
  const Parts parts(first, second, split);
  const bool fits =
      __all_sync(kFull, first <= S::kRoom && second <= S::kRoom) && parts.total < static_cast<uint32_t>(a.k);
  if (threadIdx.x == 0) {
    m.kept = fits ? parts.total : kFinishRoom + 1u;
    m.next = 0;
  }
  __syncthreads();
  if (fits) {  // too few
    const SharedWords counter(&m.next);
    for (uint32_t b = warp; b < parts.blocks; b += kWarps) {
      uint32_t part, i;
      if (parts.find(b, part, i)) m.list[counter.take(1)] = left.lists[part * S::kRoom + i];
    }
    __syncthreads();
  }
  const Row<T> row = row_of<T>(a, blockIdx.x);
  const Pivot pivot{settle<T, kThreads>(a.k, row, left.heads[0].pivot, m.s, m.list, kFinishRoom, m.kept),
                    left.heads[0].top, false};
  clear<kThreads>(m.s.bins[0], kBins);
  __syncthreads();
  Survivors<kThreads, kFinishRoom / kThreads>(m.list, m.kept)
      .write(a, row.number, row.length, m.kept, pivot, reinterpret_cast<uint32_t*>(m.list), sizeof(m.list) / 4, m.s);
}

// and one block for each row finishes it.
template <class T, class S>
__global__ void __launch_bounds__(kFinishThreads, 1) finish_rows(const __grid_constant__ Arguments a, int split) {
  constexpr int kThreads = kFinishThreads;
  constexpr int kWarps = kThreads / 32;
  constexpr uint32_t kSlots = kFinishRoom / kThreads;
  Last& m = *reinterpret_cast<Last*>(dynamic_memory());
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  clear<kThreads>(m.s.bins[0], kBins);
  const Left<S> left(a, split);
  wait_for_earlier();
  const uint32_t first = lane < split ? left.heads[lane].kept : 0u;
  const uint32_t second = lane + 32 < split ? left.heads[lane + 32].kept : 0u;
  const Pivot pivot{left.heads[0].pivot, left.heads[0].top, false};
  const int length = row_of<T>(a, blockIdx.x).length;
  allow_next();
  if (length <= a.k) {
    emit_all<kThreads>(a, blockIdx.x, length);
    return;
  }
  const uint32_t k = a.k;
  Parts parts(first, second, split);
  const bool fits = __all_sync(kFull, first <= S::kRoom && second <= S::kRoom) && parts.blocks <= kSlots * kWarps;
  uint32_t wanted = 0, late[2] = {0, 0};
  if constexpr (S::kStages == 0) {
    if (fits && parts.total < k) {  // of the parts that have the first ones equal to the pivot, the second list
      const uint32_t own = lane < split ? left.heads[lane].merged : 0u;
      const uint32_t far = lane + 32 < split ? left.heads[lane + 32].merged : 0u;
      const uint32_t equal = own - min(own, first), more = far - min(far, second);
      const uint32_t end = warp_inclusive(equal), last = __shfl_sync(kFull, end, 31) + warp_inclusive(more);
      const uint32_t lacking = k - parts.total;
      if (__shfl_sync(kFull, last, 31) >= lacking) {
        const bool one = equal && end - equal < lacking, two = more && last - more < lacking;
        late[0] = __ballot_sync(kFull, one);
        late[1] = __ballot_sync(kFull, two);
        parts = Parts(one ? own : first, two ? far : second, split);
        wanted = lacking;
      }
    }
  }
  if (!fits || parts.total < k) {
    finish_anyhow<T, S>(a, split, m);
    return;
  }
  const uint32_t slots = (parts.blocks + kWarps - 1) / kWarps;
  Survivors<kThreads, kSlots> survivors(slots);
  survivors.load([&](int j, uint32_t& bits, uint32_t& column) {  // a warp takes neighbouring blocks
    uint32_t part, i;
    const bool there = parts.find(warp * slots + j, part, i);
    if (wanted && late[part >> 5 & 1] >> (part & 31) & 1u) i += kMaxK;
    if (there) {
      const uint2 entry = left.lists[part * S::kRoom + i];
      bits = entry.x, column = entry.y;
    }
  });
  __syncthreads();
  if constexpr (S::kStages == 0)
    survivors.write_in_order(a, blockIdx.x, length, parts.total, pivot, wanted, m.s);
  else
    survivors.write(a, blockIdx.x, length, parts.total, pivot, reinterpret_cast<uint32_t*>(m.list),
                    sizeof(m.list) / 4, m.s);
}

constexpr int kSharedLimit = 99 * 1024 - 64;  // of a block on sm_120, less what is declared beside
static_assert(sizeof(Whole<Many>) <= kSharedLimit && sizeof(Whole<Short>) <= kSharedLimit, "too large for sm_120");
static_assert(sizeof(Part<Ring>) <= kSharedLimit && sizeof(Last) <= kSharedLimit, "too large for sm_120");

// ---------------------------------------------------------------------------------------------------------------
// Host.

struct Plan {
  int path;
  int threads;
  int held;  // elements that a thread holds; 0: it has a ring
  int split;
  long long bytes;
};

// The room that a row can need in registers: one that begins off a 16-byte boundary wastes a part of a vector.
long long widest_of(const Arguments& a) {
  const int per = a.bf16 ? 8 : 4;
  const bool aligned = !a.starts && a.stride % per == 0 && reinterpret_cast<uintptr_t>(a.scores) % 16 == 0;
  return a.width + (aligned ? 0 : per - 1);
}

constexpr long long kWidestResident = 16384;

constexpr long long kWidestShort = 32LL * Short::kThreads;

Plan plan_of(const Arguments& a) {
  Plan p{a.path, Many::kThreads, 0, 1, 0};
  const long long processors = a.processors < 1 ? 1 : a.processors;
  const long long widest = widest_of(a);
  const bool few = a.rows <= processors;
  if (p.path == 0)
    p.path = widest <= kWidestResident ? 1 : !few || (widest <= kWidestShort && 4 * a.rows > processors) ? 2 : 3;
  if (p.path == 1) {
    const bool narrow = widest <= kWidestResident / 2;
    p.threads = few ? 1024 : 512;
    p.held = few ? narrow ? 8 : 16 : narrow ? 16 : 32;
  }
  if (p.path == 2 && few && widest <= kWidestShort) p.threads = Short::kThreads, p.held = 32;
  if (p.path == 3) {
    long long split = a.split;
    if (!split) {
      const long long fair = 2 * processors / (a.rows > 0 ? a.rows : 1);
      const long long least = widest <= kWidestShort ? 2048 : 4096, useful = (a.width + least - 1) / least;
      split = fair < useful ? fair : useful;
    }
    p.split = static_cast<int>(split < 1 ? 1 : split > kMaxSplit ? kMaxSplit : split);
    const long long per = a.bf16 ? 8 : 4, share = ((widest + per - 1) / per + p.split - 1) / p.split * per;
    p.held = share <= 32 * Held::kThreads ? 32 : 0;
    p.threads = p.held ? Held::kThreads : Ring::kThreads;
    p.bytes = a.rows * p.split * static_cast<long long>(sizeof(Head) + Held::kRoom * sizeof(uint2));
  }
  return p;
}

static_assert(Held::kRoom == Ring::kRoom, "they leave the same for the finish");

template <class T>
cudaError_t prepare() {
  const auto most = [](auto kernel, size_t bytes) {
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  };
  cudaError_t error = most(stream_rows<T, Many>, sizeof(Whole<Many>));
  if (error == cudaSuccess) error = most(stream_rows<T, Short>, sizeof(Whole<Short>));
  if (error == cudaSuccess) error = most(filter_rows<T, Held>, sizeof(Part<Held>));
  if (error == cudaSuccess) error = most(filter_rows<T, Ring>, sizeof(Part<Ring>));
  if (error == cudaSuccess) error = most(finish_rows<T, Held>, sizeof(Last));
  if (error == cudaSuccess) error = most(finish_rows<T, Ring>, sizeof(Last));
  return error;
}

// Each kernel waits by itself for those before it, so it may be set up while they still run.
template <class Kernel, class... More>
cudaError_t start(Kernel kernel, long long blocks, int threads, size_t bytes, cudaStream_t stream, const Arguments& a,
                  More... more) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, a, more...);
}

template <class T>
cudaError_t launch(const Arguments& a, const Plan& p, cudaStream_t stream) {
  const long long rows = a.rows, blocks = rows * p.split;
  if (p.path == 1) {
    if (p.held == 8) return start(resident_rows<T, 1024, 8, 1>, rows, 1024, 0, stream, a);
    if (p.held == 32) return start(resident_rows<T, 512, 32, 2>, rows, 512, 0, stream, a);
    if (p.threads == 1024) return start(resident_rows<T, 1024, 16, 1>, rows, 1024, 0, stream, a);
    return start(resident_rows<T, 512, 16, 3>, rows, 512, 0, stream, a);
  }
  if (p.path == 2) {
    if (p.held) return start(stream_rows<T, Short>, rows, Short::kThreads, sizeof(Whole<Short>), stream, a);
    return start(stream_rows<T, Many>, rows, Many::kThreads, sizeof(Whole<Many>), stream, a);
  }
  const uint32_t inverse = static_cast<uint32_t>(0x100000000LL / p.split + 1);  // above 2^32 / split
  const cudaError_t error =
      p.held ? start(filter_rows<T, Held>, blocks, Held::kThreads, sizeof(Part<Held>), stream, a, p.split, inverse)
             : start(filter_rows<T, Ring>, blocks, Ring::kThreads, sizeof(Part<Ring>), stream, a, p.split, inverse);
  if (error != cudaSuccess) return error;
  if (p.held) return start(finish_rows<T, Held>, rows, kFinishThreads, sizeof(Last), stream, a, p.split);
  return start(finish_rows<T, Ring>, rows, kFinishThreads, sizeof(Last), stream, a, p.split);
}

}  // namespace

extern "C" {

// The SHA-256 of this file, as the build was told it.
const char* exact_topk_identity() { return EXACT_TOPK_IDENTITY; }

int exact_topk_argument_bytes() { return static_cast<int>(sizeof(Arguments)); }

// Bytes that the launch with these arguments needs as workspace.
long long exact_topk_workspace(const Arguments* a) { return plan_of(*a).bytes; }

// path * 1000000 + threads * 100 + split: which way these arguments go.
int exact_topk_plan(const Arguments* a) {
  const Plan p = plan_of(*a);
  return p.path * 1000000 + p.threads * 100 + p.split;
}

// Once for each device, before the first launch and outside of any capture.
int exact_topk_prepare() {
  cudaError_t error = prepare<float>();
  if (error == cudaSuccess) error = prepare<Bf16>();
  return static_cast<int>(error);
}

// 0, a CUDA error number, or -1 (arguments), -2 (workspace), -3 (the forced path cannot take this width).
int exact_topk_launch(const Arguments* a, cudaStream_t stream) {
  if (a->k < 1 || a->k > kMaxK || a->rows < 0 || a->width < 0 || a->path < 0 || a->path > 3) return -1;
  if (a->rows == 0) return 0;
  const Plan p = plan_of(*a);
  if (a->rows * p.split > 0x7FFFFFFFLL || a->width > 0x7FFFFF00LL) return -1;
  if (p.path == 1 && widest_of(*a) > kWidestResident) return -3;
  if (p.bytes > a->workspace_bytes) return -2;
  return static_cast<int>(a->bf16 ? launch<Bf16>(*a, p, stream) : launch<float>(*a, p, stream));
}

const char* exact_topk_error(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

}  // extern "C"
