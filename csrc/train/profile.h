// --profile STEPS: how a step spends its time. Events on the stream time every call of an operation and every copy;
// nothing waits for them until the last of the steps has been launched.
#pragma once
#include <cstdint>
#include <memory>
#include <string>

#include "core/context.h"
#include "core/folder.h"

namespace llamac {

struct Recording;

struct ProfiledSteps {
    int64_t first = 1, count = 0;  // count 0: none
};
// Of the steps first .. last: `count`, without the first one, in which memory is touched and kernels are loaded for
// the first time, if there are enough.
ProfiledSteps choose_profiled_steps(int64_t first, int64_t last, int64_t count);

struct Profile {
    // context: the one that the steps run with; observed while they do. out: the run's folder. peak_flops: per second, 0
    // where unknown. records: false on ranks that only go along with the one that does.
    Profile(const ProfiledSteps& steps, Context& context, const OpenFolder& out, double peak_flops,
            bool records = true);
    ~Profile();
    Profile(const Profile&) = delete;

    // Around the launches of each step; does nothing where that step is not among those to profile.
    void begin_step(int64_t step);
    void end_step();
    // Whether this is the last step to profile, after which finish() is due: the same on all ranks.
    bool ends_with(int64_t step) const;
    // Waits for the steps, prints a table (time a step, share, GFLOP/s and GB/s by the descriptions' least counts),
    // writes OUT/profile.json and OUT/trace.json. Of the steps so far, for a run that ends early; once.
    void finish();

  private:
    const ProfiledSteps steps;
    Context& context;
    const OpenFolder& out;
    const double peak_flops;
    std::unique_ptr<Recording> recording;  // null: nothing to profile, or it is written
};

}  // namespace llamac
