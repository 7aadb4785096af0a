#include "train/trainer.h"

#include "train/sample.h"

namespace llamac {
namespace {

constexpr int64_t devices = 1;

ModelOptions model_options(const Options& o) {
    ModelOptions m;
    m.batch_size = o.batch_size;
    m.seq_len = o.seq_len;
    m.precision = {storage_type(o.dtype), storage_type(o.grad_dtype), storage_type(o.optimizer_state),
                   o.master_weights == "on"};
    m.recompute = parse_recompute(o.recompute);
    return m;
}

Config model_config(const Options& o) {
    const Config config = load_config(o.model);
    if (o.seq_len > config.max_context)
        fail("--seq-len ", o.seq_len, ": the model's longest sequence (max_position_embeddings) is ",
             config.max_context);
    return config;
}

Loader load_data(const std::string& pattern, const Options& o, const Config& config, int64_t accumulation) {
    return Loader(pattern, o.seq_len, config.V, o.batch_size, accumulation, static_cast<uint64_t>(o.seed));
}

// A model that validates on other ids than it trains on would only look bad: refuse it.
void check_same_tokenizer(const Loader& train, const Loader& val) {
    const TokenShard& a = train.shards[0];
    for (const TokenShard& b : val.shards)
        if (a.tokenizer_hash && b.tokenizer_hash && a.tokenizer_hash != b.tokenizer_hash)
            fail(b.file.path, ": expected tokens of the tokenizer that made ", a.file.path,
                 ", found another's");
}

void load_optimizer(Model& model, const std::string& checkpoint) {
    const SafetensorsFile file(checkpoint + "/optimizer.safetensors");
    for (const NamedTensor& t : optimizer_tensors(model.parameters)) {
        const SafetensorsFile::Entry* entry = file.find(t.name);
        if (entry && entry->dtype != t.tensor.dtype)
            fail(file.path(), ": ", t.name, " is ", name(entry->dtype), ", expected ", name(t.tensor.dtype));
        file.read(t.name, t.tensor);
    }
}

void resume(Trainer& t) {
    const Manifest manifest = open_checkpoint(t.resumed_from);
    check_resume(manifest, t.resumed_from, t.options);
    const DType dtype = t.model.options.precision.weights;
    if (config_json(load_config(t.resumed_from), dtype) != config_json(t.config, dtype))
        fail(t.resumed_from, "/config.json: is not the model that --model ", t.options.model, " means");
    load_weights(t.model.parameters, t.resumed_from);
    load_optimizer(t.model, t.resumed_from);
    t.step = manifest.step;
}

}  // namespace

Trainer::Trainer(const Options& o)
    : options(o),
      resumed_from(checkpoint_to_resume(o.out, o.resume)),
      config(model_config(o)),
      accumulation(micro_steps(o, devices)),
      train(load_data(o.train_data, o, config, accumulation)),
      tokenizer(find_tokenizer(o.tokenizer, train)),
      schedule{o.schedule, o.lr, o.min_lr_frac, o.warmup_steps, o.steps},
      model(config, model_options(o)),
      tokens(static_cast<size_t>(o.batch_size * o.seq_len)),
      targets(tokens.size()) {
    if (!o.val_data.empty()) {
        val.emplace(load_data(o.val_data, o, config, 1));
        check_same_tokenizer(train, *val);
        val->validation_batches(o.val_steps);  // refuses too little data now, not after the first hour
    }
    if (!resumed_from.empty())
        resume(*this);
    else if (o.init == "load")
        load_weights(model.parameters, o.model);
    else
        initialize(model.parameters, config, static_cast<uint64_t>(o.seed));
}

UpdateResult Trainer::update() {
    UpdateResult result{0, 0, learning_rate(schedule, step + 1)};
    for (int64_t micro = 0; micro < accumulation; micro++) {
        train.micro_batch(step, micro, 0, devices, tokens.data(), targets.data());
        result.loss += forward_backward(model, tokens.data(), targets.data(), options.batch_size,
                                        options.seq_len, micro == 0, 1.0 / static_cast<double>(accumulation));
    }
    result.loss /= static_cast<double>(accumulation);
    const AdamW adamw{result.lr, options.beta1, options.beta2, 1e-8, options.weight_decay, options.grad_clip};
    result.grad_norm = llamac::update(model, adamw, step + 1, static_cast<uint64_t>(options.seed));
    step++;
    return result;
}

double Trainer::validate() {
    const int64_t batches = val->validation_batches(options.val_steps);
    double sum = 0;
    for (int64_t batch = 0; batch < batches; batch++) {
        val->validation_batch(batch, tokens.data(), targets.data());
        sum += forward(model, tokens.data(), targets.data(), options.batch_size, options.seq_len);
    }
    return sum / static_cast<double>(batches);
}

std::string Trainer::sample() {
    const int32_t start =
        tokenizer ? tokenizer->end_of_text : static_cast<int32_t>(std::max<int64_t>(config.bos, 0));
    const Sampling sampling{options.sample_temperature, options.sample_top_k,
                            static_cast<uint64_t>(options.seed), static_cast<uint32_t>(step)};
    const std::vector<int32_t> ids = generate(model, {start}, options.sample_tokens, sampling);
    if (tokenizer) return tokenizer->decode(ids);
    std::string text;
    for (int32_t id : ids) text += (text.empty() ? "" : " ") + std::to_string(id);
    return text;
}

std::string Trainer::save() {
    Manifest manifest = describe_run(options, devices, step);
    for (const Operation* op : operations())
        for (const Variant* v : op->selected) {
            std::string& names = manifest.kernels[op->name];
            names += std::string(names.empty() ? "" : ",") + v->name;
        }
    const std::string json = config_json(config, model.options.precision.weights);
    return write_checkpoint(options.out, options.keep_checkpoints, manifest, json,
                            weight_tensors(model.parameters), optimizer_tensors(model.parameters));
}

}  // namespace llamac
