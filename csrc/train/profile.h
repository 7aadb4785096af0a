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
// `count` of the steps first .. last, without the first one if there are enough: it touches memory and loads kernels for the
// first time.
ProfiledSteps choose_profiled_steps(int64_t first, int64_t last, int64_t count);

struct Profile {
    // context: of the steps, which it observes. out: the run's folder. peak_flops: per second; 0: not known. records: false on
    // the ranks that do not profile.
    Profile(const ProfiledSteps& steps, Context& context, const OpenFolder& out, double peak_flops,
            bool records = true);
    ~Profile();
    Profile(const Profile&) = delete;

    // To be called around the launches of each step.
    void begin_step(int64_t step);
    void end_step();
    // Whether this is the last step to profile, after which finish() is due: the same on all ranks.
    bool ends_with(int64_t step) const;
    // Waits for the steps, prints a table (time a step, share, GFLOP/s and GB/s by the descriptions' least counts),
    // writes OUT/profile.json and OUT/trace.json. A run that ends early has the steps so far.
    void finish();

  private:
    const ProfiledSteps steps;
    Context& context;
    const OpenFolder& out;
    const double peak_flops;
    std::unique_ptr<Recording> recording;  // null: nothing to profile, or it is written
};

}  // namespace llamac
