// The program that benchmarks/alive.py describes, for ik_llama.cpp: it takes the options of llama-sweep-bench.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <sstream>
#include <string>

#include "common.h"
#include "ggml.h"
#include "llama.h"

static llama_context * ctx;
static llama_batch batch;
static int n_batch, n_vocab, filled = 0;

// Decode n tokens from position first on; logits of the last one only.
static void decode(int first, int n) {
    for (int start = 0; start < n; start += n_batch) {
        const int end = std::min(n, start + n_batch);
        batch.n_tokens = 0;
        for (int i = start; i < end; ++i) {
            common_batch_add(batch, std::rand() % n_vocab, first + i, { 0 }, i == n - 1);
        }
        if (llama_decode(ctx, batch) != 0) {
            fprintf(stderr, "llama_decode failed\n");
            exit(1);
        }
    }
    llama_synchronize(ctx);
}

static double seconds(int n, bool one_by_one) {
    if (!llama_kv_cache_seq_rm(ctx, 0, filled, -1)) {
        fprintf(stderr, "a recurrent model cannot forget what is behind its prompt\n");
        exit(1);
    }
    const int64_t started = ggml_time_us();
    if (one_by_one) {
        for (int i = 0; i < n; ++i) decode(filled + i, 1);
    } else {
        decode(filled, n);
    }
    return 1e-6 * (ggml_time_us() - started);
}

static void fill(int n, const std::string & path) {
    llama_kv_cache_clear(ctx);
    size_t n_tokens = 0;
    if (FILE * file = fopen(path.c_str(), "rb")) {
        fclose(file);
        if (!llama_state_seq_load_file(ctx, path.c_str(), 0, nullptr, 0, &n_tokens)) {
            fprintf(stderr, "%s cannot be loaded\n", path.c_str());
            exit(1);
        }
    } else if (n > 0) {
        decode(0, n);
        if (!llama_state_seq_save_file(ctx, path.c_str(), 0, nullptr, 0)) {
            fprintf(stderr, "%s cannot be written\n", path.c_str());
            exit(1);
        }
    }
    filled = n;
}

int main(int argc, char ** argv) {
    gpt_params params;
    params.sweep_bench = true;
    if (!gpt_params_parse(argc, argv, params)) return 1;
    llama_backend_init();
    llama_numa_init(params.numa);
    llama_model * model = llama_model_load_from_file(params.model.c_str(), common_model_params_to_llama(params));
    if (!model) return 1;
    ctx = llama_init_from_model(model, common_context_params_to_llama(params));
    if (!ctx) return 1;
    n_batch = params.n_batch;
    n_vocab = llama_n_vocab(model);
    batch = llama_batch_init(n_batch, 0, 1);
    seconds(4, true);
    seconds(params.n_ubatch, false);
    printf("ready\n");
    fflush(stdout);
    for (std::string line; std::getline(std::cin, line);) {
        std::istringstream words(line);
        std::string name, path;
        int n = 0;
        words >> name >> n >> path;
        double answer = n;
        if (name == "fill") fill(n, path);
        else answer = seconds(n, name == "tg");
        printf("answer %.6f\n", answer);
        fflush(stdout);
    }
    return 0;
}
