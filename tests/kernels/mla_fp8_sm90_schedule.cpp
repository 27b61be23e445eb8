// Runs the Hopper kernel's own scheduling code on the host, where every block's pieces can be seen.
//
// SCHEDULE is mla_fp8_sm90_schedule.cuh without its include. Reads "blocks heads causal batch", then for each request its
// query tokens and its KV tokens. Writes, for each piece, "piece block request first_row rows begin tiles slot" (slot -1:
// the result is final), then for each (request, row tile), "item request first_row slots...".
#include <algorithm>
#include <cstdio>
#include <vector>

#define __device__
#define ROWS 16
using i64 = long long;
using std::max, std::min;
struct int2 { int x, y; };
struct { int x; } threadIdx, blockIdx;
int __shfl_up_sync(unsigned, int value, int) { return value; }  // find_span needs these names; it is not called here
int __reduce_max_sync(unsigned, int value) { return value; }
int __reduce_add_sync(unsigned, int value) { return value; }
void __syncthreads() {}

#include SCHEDULE

int main() {
  Params p = {};
  if (std::scanf("%d %d %d %d", &p.blocks, &p.heads, &p.causal, &p.batch) != 4) return 1;
  std::vector<int> tokens(p.batch + 1), lens(p.batch);
  for (int i = 0; i < p.batch; ++i) {
    int count;
    if (std::scanf("%d %d", &count, &lens[i]) != 2) return 1;
    tokens[i + 1] = tokens[i] + count;
  }
  static float lse[1];  // only its address is used, as the next one's
  static unsigned short partial[1];
  p.qo_indptr = tokens.data(), p.kv_lens = lens.data(), p.partial = partial, p.partial_lse = lse;
  Work work = {};
  for (int i = 0; i < p.batch; ++i) work.add(p, load_request(p, i));
  const Schedule schedule = Schedule::of(p.blocks, work);
  std::vector<int2> items(work.items / p.blocks + 1);
  p.items = items.data();
  std::vector<int> first(p.batch + 1);
  for (int i = 0; i < p.batch; ++i) {
    const Request r = load_request(p, i);
    first[i + 1] = first[i] + r.row_tiles(p.heads) * schedule.item_tiles(r.kv_tiles());
  }
  for (int block = 0; block < p.blocks; ++block) {
    blockIdx.x = block;
    Span span = {};
    if (schedule.whole) {
      const Rounds rounds(schedule, work.items);
      for (int i = 0, before = 0; i < p.batch; ++i) {
        const Request r = load_request(p, i);
        const int row_tiles = r.kv_tiles() ? r.row_tiles(p.heads) : 0;
        rounds.list(block, i, before, row_tiles, p.items);
        before += row_tiles;
      }
      span = {-1, 0, rounds.count(block), 0, {}};
    } else {
      const int start = block * schedule.quota;
      if (start >= first[p.batch]) break;
      const int request = std::upper_bound(first.begin(), first.end(), start) - first.begin() - 1;
      span = {request, start - first[request], min(schedule.quota, first[p.batch] - start), schedule.padded,
              load_request(p, request)};
    }
    for (Piece piece; next_piece(p, span, piece);) {
      const int owner = piece.request.first_token, slot = (piece.partial_lse - p.partial_lse) / ROWS;
      const int at = std::upper_bound(tokens.begin(), tokens.end(), owner) - tokens.begin() - 1;
      std::printf("piece %d %d %d %d %d %d %d\n", block, at, piece.first_row, piece.rows, piece.begin, piece.tiles,
                  piece.partial ? slot : -1);
    }
  }
  for (int i = 0; i < p.batch; ++i) {
    const Request r = load_request(p, i);
    for (int tile = 0; tile < r.row_tiles(p.heads); ++tile) {
      const Parts parts(schedule.quota, first[i] + tile * schedule.item_tiles(r.kv_tiles()), r.kv_tiles());
      std::printf("item %d %d", i, tile * ROWS);
      for (int part = 0; part < parts.count; ++part) std::printf(" %d", parts.slot(part));
      std::printf("\n");
    }
  }
}
