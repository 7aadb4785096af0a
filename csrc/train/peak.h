// What this machine's matrix product reaches: the 100% that a run's rate is measured against.
#pragma once

namespace llamac {

// FLOP/s of a 1024^3 product in f32, all threads, the best of the tries that fit in a tenth of a second;
// 0 where a GPU computes: its peak is not known yet.
double measure_peak_flops();

}  // namespace llamac
