// The Hopper instructions that mla_fp8_sm90.cu is made of, one function each. It includes no CUDA header, so that
// NVRTC, which comes with torch, can build it where there is no toolkit.
#pragma once

using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

__device__ inline u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// ---- numbers --------------------------------------------------------------------------------------------------------

// Two e4m3 bytes, the low or the high half of `word`, as two fp16. Exact: every e4m3 value is an fp16 value.
__device__ inline u32 e4m3x2_lo(u32 word) {
  u32 pair;
  asm("{ .reg .b16 lo, hi; mov.b32 {lo, hi}, %1; cvt.rn.f16x2.e4m3x2 %0, lo; }" : "=r"(pair) : "r"(word));
  return pair;
}

__device__ inline u32 e4m3x2_hi(u32 word) {
  u32 pair;
  asm("{ .reg .b16 lo, hi; mov.b32 {lo, hi}, %1; cvt.rn.f16x2.e4m3x2 %0, hi; }" : "=r"(pair) : "r"(word));
  return pair;
}

__device__ inline u32 pack_f16x2(float lo, float hi) {
  u32 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(hi), "f"(lo));
  return pair;
}

__device__ inline u32 pack_bf16x2(float lo, float hi) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(hi), "f"(lo));
  return pair;
}

__device__ inline float2 unpack_f16x2(u32 pair) {
  float2 value;
  asm("{ .reg .b16 lo, hi; mov.b32 {lo, hi}, %2; cvt.f32.f16 %0, lo; cvt.f32.f16 %1, hi; }"
      : "=f"(value.x), "=f"(value.y)
      : "r"(pair));
  return value;
}

__device__ inline float2 unpack_bf16x2(u32 pair) {
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

// Exact for a power of two.
__device__ inline u32 multiply_bf16x2(u32 a, u32 b) {
  u32 pair;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
  return pair;
}

__device__ inline u32 max_u16x2(u32 a, u32 b) {
  u32 pair;
  asm("max.u16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
  return pair;
}

__device__ inline float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ inline float infinity() { return __int_as_float(0x7f800000); }

// ---- copies and barriers --------------------------------------------------------------------------------------------

// A barrier in shared memory that completes a phase when `arrivals` threads and all announced bytes have arrived.
__device__ inline void barrier_init(u32 barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ inline void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ inline void barrier_arrive_expecting(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Waits until the phase of that parity is complete; before the first phase, parity 1 counts as complete.
__device__ inline void barrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; @!done bra again; }"
      :
      : "r"(barrier), "r"(parity)
      : "memory");
}

// `bytes` (a multiple of 16) from global to shared memory by the copy engine, which reports to the barrier.
__device__ inline void copy_bulk(u32 shared, const void* global, u32 bytes, u32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      :
      : "r"(shared), "l"(global), "r"(bytes), "r"(barrier)
      : "memory");
}

// A barrier among `Threads` threads; the name is that of one of the block's 16 hardware barriers.
template <int Name, int Threads>
__device__ inline void sync_threads() {
  asm volatile("bar.sync %0, %1;" ::"n"(Name), "n"(Threads) : "memory");
}

template <int Name, int Threads>
__device__ inline bool sync_threads_or(bool vote) {
  u32 any;
  asm volatile(
      "{ .reg .pred in, out; setp.ne.u32 in, %1, 0; bar.red.or.pred out, %2, %3, in; selp.u32 %0, 1, 0, out; }"
      : "=r"(any)
      : "r"(static_cast<u32>(vote)), "n"(Name), "n"(Threads)
      : "memory");
  return any;
}

template <int Registers>
__device__ inline void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}

template <int Registers>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}

// Orders this thread's ordinary writes to shared memory before what the tensor cores or the copy engine do with it.
__device__ inline void fence_for_engines() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Programmatic dependent launch: let the next kernel of the stream start early, and wait for the one before to be done.
__device__ inline void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ inline void wait_for_primary() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// ---- wgmma ----------------------------------------------------------------------------------------------------------

__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int Pending>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

// Keeps the compiler from moving a use of the accumulators above the wait that makes them valid.
template <int Count>
__device__ inline void pin(float (&registers)[Count]) {
#pragma unroll
  for (int i = 0; i < Count; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

// B operands of 16 (k) x 8 * ColumnBlocks values, one after the other in shared memory, each in 8 x 8 core matrices of
// 128 bytes, column blocks first, unswizzled. A descriptor has the address in bits 0-13, the stride between k blocks in
// bits 16-29 and that between column blocks in bits 32-45, in units of 16 bytes. Only its low half depends on the
// address, and the next operand's is one addition away: computing it anew took longer than the product it was for.
template <int ColumnBlocks>
struct Operands {
  u32 low;

  __device__ explicit Operands(const void* pointer) : low(shared_address(pointer) >> 4 | ColumnBlocks * 8 << 16) {}

  __device__ u64 at(int index) const {
    u64 descriptor;
    asm("mov.b64 %0, {%1, %2};" : "=l"(descriptor) : "r"(low + index * ColumnBlocks * 16), "n"(8));
    return descriptor;
  }
};

// d[64 x 8 * ColumnBlocks] += a[64 x 16] b, a in registers and b in shared memory. The 8 x 8 core matrices of b have k
// contiguous, or, with TransposeB, columns.
#define WGMMA_D4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WGMMA_D8(d, i) WGMMA_D4(d, i), WGMMA_D4(d, i + 4)

template <int TransposeB>
__device__ inline void wgmma(float (&d)[8], const u32 (&a)[4], u64 b) {
  asm volatile(
      "{ .reg .pred p; setp.eq.u32 p, 0, 0; "
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7}, "
      "{%8, %9, %10, %11}, %12, p, 1, 1, %13; }"
      : WGMMA_D8(d, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(TransposeB));
}

template <int TransposeB>
__device__ inline void wgmma(float (&d)[16], const u32 (&a)[4], u64 b) {
  asm volatile(
      "{ .reg .pred p; setp.eq.u32 p, 0, 0; "
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15}, {%16, %17, %18, %19}, %20, p, 1, 1, %21; }"
      : WGMMA_D8(d, 0), WGMMA_D8(d, 8)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(TransposeB));
}

template <int TransposeB>
__device__ inline void wgmma(float (&d)[32], const u32 (&a)[4], u64 b) {
  asm volatile(
      "{ .reg .pred p; setp.eq.u32 p, 0, 0; "
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
      "%24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, p, 1, 1, %37; }"
      : WGMMA_D8(d, 0), WGMMA_D8(d, 8), WGMMA_D8(d, 16), WGMMA_D8(d, 24)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(TransposeB));
}
