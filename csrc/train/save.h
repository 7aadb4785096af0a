// Checkpoints of a trainer. No step may be in flight.
#pragma once
#include <functional>
#include <memory>
#include <string>

#include "checkpoint/async_saves.h"
#include "core/folder.h"
#include "train/memory.h"
#include "train/trainer.h"

namespace llamac {

// Calls visit for each parameter with its whole weight, which is valid until visit returns. wanted: the parameters whose weights
// this rank needs, by default all; the weights of others may have no data.
void visit_weights(Trainer& t, const std::function<void(const Parameter&, const Tensor& weight)>& visit,
                   const std::function<bool(const Parameter&)>& wanted = {});
// Writes OUT/step_NNNNNN; returns its path.
std::string save(Trainer& t, const OpenFolder& out);
// Writes the same into a directory of any name, which must not exist; among a run's checkpoints, under the run's lock.
void save_to(Trainer& t, const std::string& directory);

// Whether --checkpoint-async asks for asynchronous saves and a checkpoint precedes that of the last step.
bool saves_async(const Trainer& t);
// The host memory that they take: a copy of this rank's weights and optimizer state.
MemoryRow copy_row(const Trainer& t);
// Prepares asynchronous saves if saves_async(); every rank calls it. Null, with a warning, if a host has no room.
std::unique_ptr<AsyncSaves> prepare_async_saves(Trainer& t);
// save() while training continues: returns once the state is copied. saves.finish() precedes the next call.
void start_save(Trainer& t, AsyncSaves& saves, const OpenFolder& out);

}  // namespace llamac
