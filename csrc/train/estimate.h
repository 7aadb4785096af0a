// What a run takes on devices that it plans for, which this machine need not have: memory and, estimated, the time of a step.
// Each operation of a dry run is counted by its description.
#pragma once
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "train/trainer.h"

namespace llamac {

// Published rates of links within a host and between hosts. Bytes per second in one direction; 0: not in the table.
struct Links {
    double to_one = 0;     // from a device to another one of its host
    double to_all = 0;     // from a device to all others of its host together
    double network = 0;    // from a device to other hosts
    int64_t per_host = 8;  // devices
    // Seconds per collective, and per step of its ring in a host, and between hosts.
    double call = 0, step_in_host = 0, step_between_hosts = 0;
};

// Rows of configs/tables/devices.toml.
struct PlannedDevice {
    // The rate of an operation with these dimensions.
    struct Operation {
        std::string name;
        std::map<std::string, int64_t> dimensions;
        double flops = 0;  // per second
    };
    // What a device reaches on which llamac was not measured: published rates of others, and predicted ones.
    struct Reached {
        std::map<std::string, double> products;  // FLOP per second, by the dtype of operands
        double memory_rate = 0;                  // bytes per second that operations move which memory limits
        std::vector<Operation> operations;
        double error = 0;  // percent: the largest of predictions for kernels that are published
    };
    std::string name;
    int64_t memory = 0;                   // bytes; 0: not in the table
    double memory_rate = 0;               // bytes per second; 0: not in the table
    std::map<std::string, double> flops;  // per second, of products with operands of a dtype
    std::optional<Reached> reached;
    Links links;
};

// The first row with a name that contains `name`, in any case: "mi300x". Throws Error if there is none.
PlannedDevice find_device(const std::string& name);

// The options of a dry run on --device, whose memory is that of the table where --device-memory names no other.
Options planned_options(const Options& options);

// The ranks of a dry run, seen from the first rank of the stage that takes the most memory.
Ranks planned_ranks(const Options& options, int64_t count);

// Of one device.
struct Estimate {
    int64_t memory = 0;    // the plan, and what the runtime takes
    double flops = 0;      // per step
    double moved = 0;      // bytes per step, of the operations that the device's memory limits
    double exchanged = 0;  // bytes per step, with other devices
    double seconds = 0;    // of a step: operations one after another
    double waited = 0;     // of these, for exchanges that no operation of the pass overlaps
    double idle = 0;       // of these, for other stages of a pipeline
};
// plan: a trainer of a dry run.
Estimate estimate_step(Trainer& plan, const PlannedDevice& device);
// Seconds of a step of so many tokens on one device, whose memory is taken to suffice: micro-batches of one sequence, nothing
// recomputed.
double one_device_seconds(const Options& options, int64_t tokens, const PlannedDevice& device);
// The assumptions, in one line.
std::string assumptions(const PlannedDevice& device);

}  // namespace llamac
