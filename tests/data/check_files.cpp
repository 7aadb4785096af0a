// Files, safetensors and the cache of matrix products: written files are read back, and malformed ones are refused in one
// line that names the file (run it under ASan and UBSan). Cut and changed files: tests/data/test_readers.py.
#include "check.h"

#include <sys/stat.h>
#include <unistd.h>

#include <nlohmann/json.hpp>
#include <numeric>
#include <tuple>

#include "core/folder.h"
#include "core/json.h"
#include "core/library_gemm.h"
#include "core/safetensors.h"
#include "safetensors_file.h"

using namespace llamac;

namespace files_checks {
namespace {

// ---- files ----

bool has_no_temporary_file() {
    const std::vector<std::string> names = names_in(folder);
    return std::none_of(names.begin(), names.end(),
                        [](const std::string& name) { return name.find(".tmp") != name.npos; });
}

TEST(check_files) {
    const std::string path = in_folder("text");
    check(write_file(path, "llamac") == 0x529b0d3c67418434u && get(path) == "llamac", "write_file");
    check(hash_file(path) == 0x529b0d3c67418434u, "hash_file");
    check(write_file(path, "") == 0x2d06800538d394c2u && hash_file(path) == 0x2d06800538d394c2u);
    check(InputFile(path).size == 0 && read_file(path).empty(), "empty file read");
    check(has_no_temporary_file(), "temporary file renamed");

    refused("missing file", {in_folder("none"), "No such file"}, [] { InputFile(in_folder("none")); });
    refused("folder as file", {folder, "expected a file"}, [] { InputFile{folder}; });
    refused("missing folder", {"none", "No such file"}, [] { write_file(in_folder("none/x"), ""); });
    mkfifo(in_folder("pipe").c_str(), 0600);
    refused("pipe as file", {"pipe", "expected a file"}, [] { InputFile(in_folder("pipe")); });
    refused("NUL in a path", {"a\\x00b", "no NUL"}, [] { InputFile(in_folder({"a\0b", 3})); });
    std::filesystem::create_directory(in_folder("occupied"));
    refused("folder in the way", {"occupied", "rename"}, [] { write_file(in_folder("occupied"), "x"); });
    check(has_no_temporary_file(), "temporary file removed after a failed rename");

    refused("JSON cut", {"a.json", "byte 6"}, [] { parse_json("{\"a\":", "a.json"); });
    refused("JSON key twice", {"a.json", "\"a\" twice"}, [] { parse_json("{\"a\":1,\"a\":2}", "a.json"); });
    refused("JSON too deep", {"a.json", "nesting"}, [] { parse_json(std::string(100000, '['), "a.json"); });
    refused("JSON number", {"a.json"}, [] { parse_json("1e999", "a.json"); });
    refused("JSON before a NUL", {"a.json", "byte 3"}, [] { parse_json({"{}\0x", 4}, "a.json"); });
    refused("JSON with a byte-order mark", {"a.json"}, [] { parse_json("\xef\xbb\xbf{}", "a.json"); });
    check(error_of([] { parse_json("[{\"a\":1},{\"a\":{\"a\":2}}]", "a.json"); }).empty());
}

// More than one piece, of which several threads read slices, also when it is converted.
TEST(check_large_file) {
    std::vector<float> values((Upload::max_bytes / 8) + 3);
    for (size_t i = 0; i < values.size(); i++) values[i] = static_cast<float>(i % 65521);
    const int64_t count = std::ssize(values), part = count - 5;
    const std::string path = in_folder("large.safetensors");
    const uint64_t hash = write_safetensors(path, {{"w", make_tensor(values.data(), DType::f32, {count})}});
    check(hash_file(path) == hash, "the hash of a large file");
    const SafetensorsFile file(path);
    Upload upload;
    std::vector<float> same(values.size());
    std::vector<double> wider(static_cast<size_t>(part));
    file.read("w", {count}, 0, make_tensor(same.data(), DType::f32, {count}), &upload);
    file.read("w", {count}, 5, make_tensor(wider.data(), DType::f64, {part}), &upload);
    upload.finish();
    check(same == values && std::equal(wider.begin(), wider.end(), values.begin() + 5), "a large tensor");
    std::filesystem::resize_file(path, 12 << 20);
    refused("a large file cut under a reader", {path, "found 12582912"},
            [&] { file.read("w", make_tensor(same.data(), DType::f32, {count})); });
}

// As a std::ostream would print them.
TEST(parts_of_messages) {
    const std::string text = "text";
    const auto print = [&](const auto&... parts) { return error_of([&] { fail(parts...); }); };
    check(print("a ", text, std::string_view(" b"), ' ', true) == "a text b 1", "text");
    check(print(-1, ' ', 2u, ' ', -(int64_t{1} << 40), ' ', ~uint64_t{0}) ==
              "-1 2 -1099511627776 18446744073709551615",
          "integers");
    check(print(0.1f, ' ', 1e-9, ' ', 1234567.0, ' ', 2.0) == "0.1 1e-09 1.23457e+06 2", "numbers");
}

// A file that somebody truncates while it is in use: an error, where a mapping would end the process by SIGBUS.
TEST(check_cut_file) {
    const std::string path = put("cut", std::string(3 << 20, 'x'));
    const InputFile file(path);
    std::string bytes(static_cast<size_t>(file.size), '\0');
    std::filesystem::resize_file(path, 5000);
    file.read(4000, bytes.data(), 1000);
    refused("a file cut under a reader", {path, "expected 3145728 bytes", "found 5000"},
            [&] { file.read(4000, bytes.data(), 1 << 20); });
    const std::vector<float> values(100000, 2.5f);
    std::vector<float> read(values.size());
    const Tensor tensor = make_tensor(const_cast<float*>(values.data()), DType::f32, {100000});
    const std::string weights = in_folder("cut.safetensors");
    write_safetensors(weights, {{"w", tensor}});
    const SafetensorsFile opened(weights);
    std::filesystem::resize_file(weights, 1000);
    refused("weights cut under a reader", {weights, "found 1000"},
            [&] { opened.read("w", make_tensor(read.data(), DType::f32, {100000})); });
}

// progress: of each piece, and of each time that the file was made durable.
TEST(check_progress) {
    int pieces = 0;
    const OpenFolder parent(folder);
    FileWriter writer(parent, "large");
    writer.progress = [&] { pieces++; };
    const std::string bytes(3 << 20, 'x');
    writer.write(bytes.data(), 3 << 20);
    check(pieces == 3, "a call per MiB");
    writer.finish();
    check(pieces == 4, "a call when the file is durable");
}

// A write that fails on the way leaves the file that stood there, and no temporary one.
TEST(check_full_disk) {
    const std::string path = put("kept", "old"), big(300000, 'x');
    // The first write is short, the next one fails.
    const std::string message = error_with_file_limit(100000, [&] { write_file(path, big); });
    check(message == path + ": cannot write: File too large", "file size limit: " + message);
    check(get(path) == "old" && has_no_temporary_file(), "kept after a file size limit");
}

// ---- safetensors ----

std::string safetensors(const std::string& header, const std::string& data) {
    return bytes_of<uint64_t>({header.size()}) + header + data;
}

// Opens and reads all; what is accepted must lie inside the file and cover its data exactly.
void open_and_read(const std::string& path) {
    const SafetensorsFile file(path);
    const std::string whole = get(path);
    int64_t bytes = 0;
    for (const SafetensorsFile::Entry& e : file.entries()) {
        int64_t elements = 1;
        for (int64_t size : e.shape) elements *= size;
        CHECK((!e.other.empty() || elements * size_of(e.dtype) == e.bytes) && file.find(e.name) == &e);
        CHECK(e.offset >= 8 && e.bytes >= 0 && e.offset + e.bytes <= static_cast<int64_t>(whole.size()));
        bytes += e.bytes;
    }
    int64_t header = 0;
    std::memcpy(&header, whole.data(), 8);
    CHECK(8 + header + bytes == static_cast<int64_t>(whole.size()));
}

TEST(check_round_trip) {
    std::vector<float> a(24);
    std::iota(a.begin(), a.end(), -3.5f);
    std::vector<bf16> b;
    for (float value : {1.0f, -2.5f, 1e30f}) b.push_back(bf16(value));
    std::vector<int32_t> c{7, -1};
    std::vector<double> d{1.0 / 3};
    const std::vector<NamedTensor> tensors{{"z.last", make_tensor(b.data(), DType::bf16, {3, 1})},
                                           {"a", make_tensor(a.data(), DType::f32, {1, 2, 3, 4})},
                                           {"quote\"\n\xc3\xa9", make_tensor(c.data(), DType::i32, {2})},
                                           {"none", make_tensor(nullptr, DType::f32, {0, 5})},
                                           {"scalar", make_tensor(d.data(), DType::f64, {})}};
    const std::string path = in_folder("round.safetensors");
    check(write_safetensors(path, tensors, {{"lr", "0.001"}}) == hash_file(path));
    const SafetensorsFile file(path);
    check(file.metadata == std::map<std::string, std::string>{{"lr", "0.001"}}, "metadata");
    check(file.entries().size() == tensors.size() && static_cast<uint8_t>(get(path)[0]) % 8 == 0, "header");
    for (size_t i = 0; i < tensors.size(); i++) {
        const SafetensorsFile::Entry& e = file.entries()[i];
        const Tensor& t = tensors[i].tensor;
        check(
            e.name == tensors[i].name && e.dtype == t.dtype && e.bytes == t.bytes() &&
                shape_text(e.shape.data(), static_cast<int>(e.shape.size())) == shape_text(t.shape, t.rank) &&
                std::equal(static_cast<const char*>(t.data), static_cast<const char*>(t.data) + t.bytes(),
                           get(path).data() + e.offset),
            "round trip of " + tensors[i].name);
    }
    std::vector<float> wide(3);
    std::vector<bf16> narrow(1);
    file.read("z.last", make_tensor(wide.data(), DType::f32, {3, 1}));
    check(wide[1] == -2.5f && wide[2] == float(bf16(1e30f)), "bf16 to f32");
    file.read("scalar", make_tensor(narrow.data(), DType::bf16, {}));
    check(narrow[0].bits == bf16(1.0f / 3).bits, "f64 to bf16");
    // 1, the smallest and the largest, a subnormal half of the smallest normal, -0, -infinity, NaN
    const std::vector<uint16_t> halves{0x3c00, 0x0001, 0x7bff, 0x0200, 0x8000, 0xfc00, 0x7e01};
    const std::vector<float> values{1, 0x1p-24f, 65504, 0x1p-15f, -0.0f, -INFINITY, NAN};
    std::vector<float> read(7);
    const std::string half =
        put("half.safetensors",
            safetensors(R"({"h":{"dtype":"F16","shape":[7],"data_offsets":[0,14]}})", bytes_of(halves)));
    SafetensorsFile(half).read("h", make_tensor(read.data(), DType::f32, {7}));
    for (size_t i = 0; i < 7; i++)
        check(std::isnan(values[i])
                  ? std::isnan(read[i])
                  : read[i] == values[i] && std::signbit(read[i]) == std::signbit(values[i]),
              "f16 to f32, " + std::to_string(i));
    refused("missing tensor", {path, "\"b\"", "found none"}, [&] { file.read("b", Tensor{}); });
    refused("other shape", {path, "\"z.last\"", "expected [3]", "found [3,1]"},
            [&] { file.read("z.last", make_tensor(wide.data(), DType::f32, {3})); });
    refused("other dtype", {path, "\"z.last\"", "expected I32", "found BF16"},
            [&] { file.read("z.last", make_tensor(c.data(), DType::i32, {3, 1})); });
    write_safetensors(path, {}, {});
    check(SafetensorsFile(path).entries().empty(), "file without tensors");
}

TEST(check_malformed_safetensors) {
    const auto one = [](const std::string& fields) {
        return safetensors("{\"t\":{" + fields + "}}", "12345678");
    };
    const std::string good = "\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]";
    check(error_of([&] { open_and_read(put("good", one(good))); }).empty(), "a good file is accepted");
    const auto two = [](const std::string& a, const std::string& b) {
        return safetensors("{\"a\":{\"dtype\":\"I32\",\"shape\":[1],\"data_offsets\":" + a +
                               "},\"b\":{\"dtype\":\"I32\",\"shape\":[1],\"data_offsets\":" + b + "}}",
                           "12345678");
    };
    const auto with = [&](const std::string& dtype, const std::string& shape, const std::string& offsets) {
        return one("\"dtype\":" + dtype + ",\"shape\":" + shape + ",\"data_offsets\":" + offsets);
    };
    const std::string f32 = "\"F32\"";
    const std::tuple<const char*, std::string, std::string> cases[] = {
        {"empty file", "", "header length"},
        {"header beyond the file", bytes_of<uint64_t>({100}) + "{}", "at most 2, found 100"},
        {"huge header", bytes_of<uint64_t>({~uint64_t{0}}) + "{}", "found 18446744073709551615"},
        {"signed header", bytes_of<uint64_t>({uint64_t{1} << 63}) + "{}", "header length"},
        {"no JSON", safetensors("garbage!", ""), "expected JSON"},
        {"list", safetensors("[1,2]", ""), "expected an object, found [1,2]"},
        {"header of 0", safetensors("", ""), "expected JSON"},
        {"trailing JSON", safetensors("{}{}", ""), "expected JSON"},
        {"bad UTF-8", safetensors("{\"\xff\":1}", ""), "expected JSON"},
        {"name twice", safetensors("{\"t\":{" + good + "},\"t\":{" + good + "}}", "12345678"), "\"t\" twice"},
        {"field twice", one(good + ",\"dtype\":\"F32\""), "\"dtype\" twice"},
        {"entry is a number", safetensors("{\"t\":3}", ""), "\"t\""},
        {"no dtype", one("\"shape\":[2],\"data_offsets\":[0,8]"), "expected dtype"},
        {"no shape", one("\"dtype\":\"F32\",\"data_offsets\":[0,8]"), "expected shape"},
        {"no offsets", one("\"dtype\":\"F32\",\"shape\":[2]"), "expected data_offsets"},
        {"another field", one(good + ",\"strides\":[1]"), "found \"strides\""},
        {"unknown dtype", with("\"F4\"", "[2]", "[0,8]"), "found \"F4\""},
        {"bytes of another dtype", with("\"I64\"", "[2]", "[0,8]"), "expected 16 bytes for I64 [2]"},
        {"dtype is a number", with("32", "[2]", "[0,8]"), "found 32"},
        {"shape is a number", with(f32, "2", "[0,8]"), "expected a list, found 2"},
        {"five dimensions", with(f32, "[1,1,1,1,2]", "[0,8]"), "at most 4 dimensions, found 5"},
        {"negative size", with(f32, "[-2]", "[0,8]"), "found -2"},
        {"fractional size", with(f32, "[2.0]", "[0,8]"), "found 2.0"},
        {"size of 2^64", with(f32, "[18446744073709551616]", "[0,8]"), "shape: expected an integer"},
        {"size of 2^63", with(f32, "[9223372036854775808]", "[0,8]"), "shape: expected an integer"},
        {"bytes overflow", with(f32, "[4611686018427387904,2]", "[0,8]"), "expected less than 2^63 bytes"},
        {"wraps to 8 bytes", with(f32, "[4611686018427387906]", "[0,8]"), "expected less than 2^63 bytes"},
        {"strides overflow", with(f32, "[0,4611686018427387904,4]", "[0,0]"),
         "expected less than 2^63 bytes"},
        {"offsets as text", with(f32, "[2]", "\"0,8\""), "expected [begin, end]"},
        {"one offset", with(f32, "[2]", "[8]"), "expected [begin, end]"},
        {"negative offset", with(f32, "[2]", "[-8,0]"), "found -8"},
        {"offsets swapped", with(f32, "[2]", "[8,0]"), "found [8,0]"},
        {"offsets past the end", with(f32, "[2]", "[8,16]"), "end <= 8"},
        {"offsets past the end by one", with(f32, "[2]", "[1,9]"), "end <= 8"},
        {"huge offset", with(f32, "[2]", "[9223372036854775800,9223372036854775807]"), "end <= 8"},
        {"fewer bytes", with(f32, "[2]", "[0,4]"), "expected 8 bytes for F32 [2], found 4"},
        {"more bytes", with("\"BF16\"", "[2]", "[0,8]"), "expected 4 bytes for BF16 [2], found 8"},
        {"overlap", two("[0,4]", "[0,4]"), "\"b\": data_offsets: expected to begin at 4"},
        {"partial overlap", two("[0,4]", "[2,6]"), "expected to begin at 4"},
        {"gap", two("[0,4]", "[4,8]") + "1234", "expected 8 bytes after the header, found 12"},
        {"gap before", with(f32, "[1]", "[4,8]"), "expected to begin at 0"},
        {"trailing byte", one(good) + "x", "expected 8 bytes after the header, found 9"},
        {"metadata is text", safetensors("{\"__metadata__\":\"x\"}", ""), "__metadata__"},
        {"metadata holds a number", safetensors("{\"__metadata__\":{\"a\":1}}", ""),
         "expected a string, found 1"},
        {"line break in a name", safetensors("{\"a\\nb\":0}", ""), "\"a\\nb\""},
    };
    for (const auto& [what, bytes, word] : cases) {
        const std::string path = put("bad.safetensors", bytes);
        refused(what, {path, word}, [&] { open_and_read(path); });
    }
}

TEST(check_large_safetensors) {
    // 5 GiB of holes: offsets past 2^32 are right.
    const std::string header =
        "{\"a\":{\"dtype\":\"BF16\",\"shape\":[2621440,1024],\"data_offsets\":[0,5368709120]},"
        "\"b\":{\"dtype\":\"I32\",\"shape\":[1],\"data_offsets\":[5368709120,5368709124]}}   ";
    const std::string path = put("large.safetensors", safetensors(header, ""));
    std::filesystem::resize_file(path, 8 + header.size() + 5368709120u);
    std::ofstream(path, std::ios::binary | std::ios::app) << bytes_of<int32_t>({1234567});
    int32_t value = 0;
    SafetensorsFile(path).read("b", make_tensor(&value, DType::i32, {1}));
    check(value == 1234567, "tensor behind 5 GiB");
    std::filesystem::remove(path);
}

TEST(check_weight_files) {
    std::vector<float> a{1, 2}, b{3};
    const std::string directory = in_folder("weights"), listing = "weights/model.safetensors.index.json";
    std::filesystem::create_directory(directory);
    refused("no weights", {"weights/model.safetensors", "No such file"}, [&] { WeightFiles{directory}; });
    write_safetensors(directory + "/one.safetensors", {{"a", make_tensor(a.data(), DType::f32, {2})}});
    write_safetensors(directory + "/two.safetensors", {{"b", make_tensor(b.data(), DType::f32, {1})}});
    put(listing, "{\"metadata\":{},\"weight_map\":{\"b\":\"two.safetensors\",\"a\":\"one.safetensors\"}}");
    const WeightFiles sharded(directory);
    float value = 0;
    sharded.read("b", {1}, 0, make_tensor(&value, DType::f32, {1}));
    check(value == 3 && sharded.find("model.a")->shape[0] == 2 && !sharded.find("c"), "sharded weights");
    refused("missing weight", {directory, "\"c\"", "none among 2: \"a\", \"b\""},
            [&] { sharded.read("c", {}, 0, Tensor{}); });
    const std::pair<const char*, const char*> cases[] = {
        {"{\"weight_map\":{\"b\":\"one.safetensors\"}}", "\"b\": expected it in one.safetensors"},
        {"{\"weight_map\":{\"b\":\"../one.safetensors\"}}", "\"b\": expected the name of a file"},
        {"{\"weight_map\":{\"b\":\"six.safetensors\"}}", "six.safetensors: cannot open"},
        {"{\"weight_map\":{\"b\":7}}", "\"b\": expected the name of a file"},
        {"{\"weight_map\":[]}", "weight_map"},
        {"[]", "weight_map"},
        {"{\"weight_map\":", "expected JSON"},
    };
    for (const auto& [text, word] : cases) {
        put(listing, text);
        refused(text, {directory, word}, [&] { WeightFiles{directory}; });
    }
    write_safetensors(directory + "/model.safetensors", {{"b", make_tensor(a.data(), DType::f32, {2})}});
    check(WeightFiles(directory).find("b")->shape[0] == 2, "model.safetensors goes before the index");
    put("weights/model.safetensors",
        safetensors(R"({"model.a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"
                    R"("model.mask":{"dtype":"BOOL","shape":[2],"data_offsets":[4,6]},)"
                    R"("model.rotary_emb.inv_freq":{"dtype":"F32","shape":[1],"data_offsets":[6,10]}})",
                    std::string(10, '\0')));
    const WeightFiles others(directory);
    others.read("model.a", {1}, 0, make_tensor(&value, DType::f32, {1}));
    refused("other type", {"model.safetensors", "model.mask", "expected", "found BOOL"},
            [&] { others.read("model.mask", {2}, 0, make_tensor(a.data(), DType::f32, {2})); });
    check(others.unused({"model.a"}) ==
              directory + ": the model does not use 1 of the files' tensors: \"model.mask\"" &&
          others.unused({"model.a", "model.mask"}).empty());
}

// ---- choices of matrix products ----

const GemmChoices some_choices = {
    "Some Device",
    "someBLASLt 130100",
    {{"nt 8192x6144x4096 bf16 bf16", {"00ff", 0.3751, 32}}, {"tn 128x64x33 bf16 f32 +c", {"0a0b", 0, 0}}}};

bool same(const GemmChoices& a, const GemmChoices& b) {
    return to_json(a).dump() == to_json(b).dump();
}

TEST(check_gemm_cache) {
    const std::string path = in_folder("cache/of/mine/gemm.json");
    check(read_gemm_cache(path).choices.empty(), "no cache yet");
    check(read_gemm_cache(in_folder(std::string(300, 'x'))).choices.empty(), "no cache can have this name");
    add_to_gemm_cache(path, some_choices);
    const GemmChoices read = read_gemm_cache(path);
    check(read.device == "Some Device" && read.library == "someBLASLt 130100", "a cache says whose it is");
    check(read.choices.size() == 1 && read.choices.at("nt 8192x6144x4096 bf16 bf16").ms == 0.3751);
    GemmChoices more = some_choices;
    more.choices = {{"nn 16x16x16 f32 f32", {"ab", 0.5, 3}}};
    add_to_gemm_cache(path, more);
    more.choices.insert(*some_choices.choices.begin());
    check(same(read_gemm_cache(path), more), "other products of the same device join");
    more.choices["nn 16x16x16 f32 f32"].algorithm = "ac";
    add_to_gemm_cache(path, more);
    check(same(read_gemm_cache(path), more));
    more.device = "Another";
    add_to_gemm_cache(path, more);
    check(same(read_gemm_cache(path), more), "another device's take their place");
    refused("a folder for a cache", {in_folder("cache")}, [] { read_gemm_cache(in_folder("cache")); });
    refused("no place for a cache", {in_folder("text")},
            [] { add_to_gemm_cache(put("text", "") + "/x", some_choices); });
    constexpr DType f32 = DType::f32, bf16 = DType::bf16;
    check((Gemm{8192, 6144, 4096, false, true, bf16, bf16, f32, f32, true}).name() ==
          "nt 8192x6144x4096 bf16 f32 +c");
    check(
        (Gemm{8, 6, 4, true, false, f32, bf16, f32, bf16, true, GemmScale::tensor, GemmScale::row}).name() ==
        "tn 8x6x4 f32/bf16 bf16 +c/f32 a*1 b*row");
    GemmAlgorithms gemms;
    if (!gemm_supports({16, 16, 16, false, true, f32, f32, f32, f32, false}, nullptr)) {
        check(gemms.choices().choices.empty() && gemms.use(some_choices).empty(), "without the library");
        return;
    }
    const std::string why = gemms.use(some_choices);
    check(why.find("Some Device") != why.npos && why.find("someBLASLt") != why.npos,
          "another device's: " + why);
    check(gemms.choices().choices.count("tn 128x64x33 bf16 f32 +c") == 0, "another device's are not taken");
}

TEST(check_malformed_gemm_cache) {
    const std::string name = "gemm.json", good = to_json(some_choices).dump(2);
    const auto malformed = [&](const std::string& what, const std::string& text) {
        const std::string path = put(name, text);
        refused("cache: " + what, {path, ": expected "}, [&] { read_gemm_cache(path); });
    };
    for (const char* text : {"[]", "null", "3", "\"text\"", "{}", "\xff"}) malformed(text, text);
    malformed("a tail", good + "{}");
    const nlohmann::json fields = nlohmann::json::parse(good);
    const std::string product = "/choices/tn 128x64x33 bf16 f32 +c";
    for (const std::string& at : {std::string("/device"), std::string("/library"), std::string("/choices"),
                                  product + "/ms", product + "/tried", product + "/algorithm"}) {
        const nlohmann::json::json_pointer field(at);
        nlohmann::json without = fields, wrong = fields;
        without[field.parent_pointer()].erase(field.back());
        wrong[field] = {1, 2};
        malformed("without " + at, without.dump());
        malformed("a list for " + at, wrong.dump());
    }
}

}  // namespace
}  // namespace files_checks
