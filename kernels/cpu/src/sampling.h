// Choice of the next token, and logprobs. Rows are independent; threads split rows.
#pragma once
#include "team.h"
#include "vocabulary.h"

// Adds bias, penalties and forbidden ids to a copy of a row. `counts` is all zero before and after.
INLINE void adjust_logits(const octavo::SampleArgs& a, int64_t r, float* logits, int32_t* counts) {
    constexpr int32_t kInPrompt = 1 << 30;
    auto known = [&](int32_t id) { return id >= 0 && id < a.vocab; };
    for (int32_t i = a.bias_starts[r]; i < a.bias_starts[r + 1]; i++)
        if (known(a.bias_ids[i])) logits[a.bias_ids[i]] += a.bias_values[i];
    const int32_t *history = a.history_ids + a.history_starts[r], *end = a.history_ids + a.history_starts[r + 1];
    const int32_t* output = history + a.history_prompt_lens[r];
    for (const int32_t* id = history; id < output; id++)
        if (known(*id)) counts[*id] = kInPrompt;
    for (const int32_t* id = output; id < end; id++)
        if (known(*id)) counts[*id]++;
    for (const int32_t* id = history; id < end; id++) {
        int32_t seen = known(*id) ? counts[*id] : 0;
        if (!seen) continue;
        counts[*id] = 0;
        float& x = logits[*id];
        float times = static_cast<float>(seen & (kInPrompt - 1));
        x = x > 0 ? x / a.repetition[r] : x * a.repetition[r];
        x -= a.frequency[r] * times;
        if (times > 0) x -= a.presence[r];
    }
    for (int32_t i = a.forbidden_starts[r]; i < a.forbidden_starts[r + 1]; i++)
        if (known(a.forbidden_ids[i])) logits[a.forbidden_ids[i]] = -__builtin_inff();
}

INLINE bool is_adjusted(const octavo::SampleArgs& a, int64_t r) {
    return a.bias_starts[r] < a.bias_starts[r + 1] || a.history_starts[r] < a.history_starts[r + 1] ||
           a.forbidden_starts[r] < a.forbidden_starts[r + 1];
}

// Gumbel-max over the whole row, min-p applied: id of the highest logit / T + Gumbel. Logits are taken relative to the
// likeliest, which keeps small differences at small temperatures.
INLINE int32_t draw_from_row(const LogitRow& row, const UniformKey& key, float temperature, float min_p, Best top) {
    F16 divisor = set1(temperature), highest = set1(top.value), rate = set1(kLog2E / temperature);
    F16 bar = gumbels(key.uniforms(iset1(top.id)));
    BestLanes lanes;
    each_vector(row, [&](int32_t id, F16 x) INLINE_BODY {
        F16 scaled = div(sub(x, highest), divisor);
        I16 ids = iadd(iset1(id), lane_numbers());
        F16 uniforms = key.uniforms(ids);
        if (!any(may_reach(uniforms, sub(bar, scaled)))) return;
        F16 value = add(scaled, gumbels(uniforms));
        M16 kept = at_least(relative_probability(x, highest, rate), set1(min_p));
        lanes.update(select(kept, value, set1(-__builtin_inff())), ids);
        bar = max(bar, set1(reduce_max(lanes.values)));
    });
    return lanes.reduce().id;
}

// Candidates in ascending order of `order`: the complement of a logit's bits made monotone, so likelier comes first.
struct Candidate {
    uint32_t order;
    int32_t id;
};

INLINE uint32_t descending_order(float logit) {
    uint32_t raw;
    __builtin_memcpy(&raw, &logit, 4);
    return ~(raw & 0x80000000u ? ~raw : raw | 0x80000000u);
}

INLINE float logit_of(uint32_t order) {
    uint32_t raw = ~order;
    raw = raw & 0x80000000u ? raw & 0x7FFFFFFFu : ~raw;
    float logit;
    __builtin_memcpy(&logit, &raw, 4);
    return logit;
}

// Stable, so that equal logits stay in ascending id. `other` is as long as `items`; returns where the result lies.
static Candidate* sort_candidates(Candidate* items, Candidate* other, int32_t count) {
    if (count <= 48) {
        for (int32_t i = 1; i < count; i++) {
            Candidate moving = items[i];
            int32_t at = i;
            for (; at > 0 && items[at - 1].order > moving.order; at--) items[at] = items[at - 1];
            items[at] = moving;
        }
        return items;
    }
    for (int shift = 0; shift < 32; shift += 8) {
        int32_t starts[257] = {};
        for (int32_t i = 0; i < count; i++) starts[(items[i].order >> shift & 255) + 1]++;
        if (starts[(items[0].order >> shift & 255) + 1] == count) continue;
        for (int b = 0; b < 256; b++) starts[b + 1] += starts[b];
        for (int32_t i = 0; i < count; i++) other[starts[items[i].order >> shift & 255]++] = items[i];
        Candidate* swapped = items;
        items = other, other = swapped;
    }
    return items;
}

INLINE int32_t gather_candidates(const LogitRow& row, float border, Candidate* to) {
    int32_t count = 0;
    each_vector(row, [&](int32_t id, F16 x) INLINE_BODY {
        uint32_t chosen = mask_bits(at_least(x, set1(border)));
        if (!chosen) return;
        float lanes[kLanes];
        store(lanes, x);
        for (; chosen; chosen &= chosen - 1) {
            int i = __builtin_ctz(chosen);
            if (id + i < row.vocab) to[count++] = {descending_order(lanes[i]), id + i};
        }
    });
    return count;
}

// Probabilities, relative to the likeliest's, of sorted candidates.
INLINE void relative_probabilities(const Candidate* items, int32_t count, float top, float temperature, float* to) {
    F16 highest = set1(top), rate = set1(kLog2E / temperature);
    for (int32_t i = 0; i < count; i += kLanes) {
        float logits[kLanes];
        for (int k = 0; k < kLanes; k++) logits[k] = i + k < count ? logit_of(items[i + k].order) : top;
        store(to + i, relative_probability(load(logits), highest, rate));
    }
}

// How many of the sorted candidates top-p keeps of what they are together.
INLINE int32_t count_kept(const float* probabilities, int32_t count, float top_p) {
    if (top_p >= 1) return count;
    double total = 0, sum = 0;
    for (int32_t i = 0; i < count; i++) total += probabilities[i];
    for (int32_t i = 0; i < count; i++) {
        sum += probabilities[i];
        if (sum >= top_p * total) return i + 1;
    }
    return count;
}

// Gumbel-max over candidates whose relative probability reaches min_p; the likeliest does in any case.
INLINE int32_t draw_from_candidates(const Candidate* items, const float* probabilities, int32_t count, float min_p,
                                    const UniformKey& key, float temperature, Best top) {
    Best best = {-__builtin_inff(), top.id};
    for (int32_t i = 0; i < count; i += kLanes) {
        int32_t ids[kLanes];
        float logits[kLanes], values[kLanes];
        for (int k = 0; k < kLanes; k++) {
            const Candidate& item = items[i + k < count ? i + k : i];
            ids[k] = item.id, logits[k] = logit_of(item.order);
        }
        F16 scaled = div(sub(load(logits), set1(top.value)), set1(temperature));
        store(values, add(scaled, gumbels(key.uniforms(iload(ids)))));
        for (int k = 0; k < kLanes && i + k < count; k++) {
            if (probabilities[i + k] < min_p && ids[k] != top.id) continue;
            if (values[k] > best.value || (values[k] == best.value && ids[k] < best.id)) best = {values[k], ids[k]};
        }
    }
    return best.id;
}

// Candidates twice over, for moves from one to the other, and their probabilities.
struct CandidateSpace {
    Candidate *items, *other;
    float *probabilities, *other_probabilities;

    explicit CandidateSpace(int32_t vocab) {
        size_t padded = vocab + kLanes;
        items = static_cast<Candidate*>(octavo::thread_scratch(
            octavo::kSortScratch, padded * 2 * (sizeof(Candidate) + sizeof(float))));
        other = items + padded;
        probabilities = reinterpret_cast<float*>(other + padded);
        other_probabilities = probabilities + padded;
    }
};

// Distances from the likeliest within which candidates are gathered, further out while that is not enough.
struct Reach {
    float distance = 4;

    INLINE_MEMBER bool is_all() const { return distance > 64; }
    INLINE_MEMBER float border(float top, float temperature) const {
        return is_all() ? -__builtin_inff() : top - distance * temperature;
    }
};

// Top-k, and top-p over what it keeps: sorts the candidates.
INLINE int32_t draw_top_k(const octavo::SampleArgs& a, int64_t r, const LogitRow& row, const UniformKey& key,
                          Best top) {
    const float temperature = a.temperatures[r];
    CandidateSpace space(row.vocab);
    for (Reach reach;; reach.distance *= 2) {
        int32_t count = gather_candidates(row, reach.border(top.value, temperature), space.items);
        if (count < a.top_ks[r] && !reach.is_all()) continue;
        const Candidate* sorted = sort_candidates(space.items, space.other, count);
        int32_t limit = a.top_ks[r] < count ? a.top_ks[r] : count;
        relative_probabilities(sorted, limit, top.value, temperature, space.probabilities);
        int32_t kept = count_kept(space.probabilities, limit, a.top_ps[r]);
        return draw_from_candidates(sorted, space.probabilities, kept, a.min_ps[r], key, temperature, top);
    }
}

constexpr int kBuckets = 256;

// Where a candidate lies between the likeliest and the border; never descends as logits do.
INLINE int bucket_of(const Candidate& item, float top, float scale) {
    float place = (top - logit_of(item.order)) * scale;
    return place < kBuckets - 1 ? static_cast<int>(place) : kBuckets - 1;
}

// Top-p over the whole row: candidates are put into buckets by distance, and only the bucket in which the sum of
// probabilities reaches top-p is sorted.
INLINE int32_t draw_top_p(const octavo::SampleArgs& a, int64_t r, const LogitRow& row, const UniformKey& key,
                          Best top) {
    const float temperature = a.temperatures[r];
    const double wanted = a.top_ps[r] * sum_of_probabilities(row, top.value, temperature);
    CandidateSpace space(row.vocab);
    for (Reach reach;; reach.distance *= 2) {
        int32_t count = gather_candidates(row, reach.border(top.value, temperature), space.items);
        relative_probabilities(space.items, count, top.value, temperature, space.probabilities);
        const float scale = kBuckets / (reach.distance * temperature);
        double masses[kBuckets] = {}, sum = 0;
        for (int32_t i = 0; i < count; i++)
            masses[bucket_of(space.items[i], top.value, scale)] += space.probabilities[i];
        int last = 0;
        while (last < kBuckets && sum + masses[last] < wanted) sum += masses[last++];
        if (last == kBuckets && !reach.is_all()) continue;
        // Before the last bucket everything is kept; its own candidates go to the end of the other space.
        int32_t kept = 0, doubtful = 0;
        Candidate* edge = space.other + count;
        for (int32_t i = 0; i < count; i++) {
            int bucket = bucket_of(space.items[i], top.value, scale);
            if (bucket < last) {
                space.other[kept] = space.items[i];
                space.other_probabilities[kept++] = space.probabilities[i];
            } else if (bucket == last) {
                *(edge - ++doubtful) = space.items[i];
            }
        }
        // They lie in descending order of id, and all of items is free again.
        for (int32_t i = 0; i < doubtful; i++) space.items[i] = *(edge - 1 - i);
        const Candidate* sorted = sort_candidates(space.items, edge - doubtful, doubtful);
        relative_probabilities(sorted, doubtful, top.value, temperature, space.probabilities);
        for (int32_t i = 0; i < doubtful && sum < wanted; i++) {
            sum += space.probabilities[i];
            space.other_probabilities[kept] = space.probabilities[i];
            Candidate moving = sorted[i];
            space.other[kept++] = moving;
        }
        return draw_from_candidates(space.other, space.other_probabilities, kept, a.min_ps[r], key, temperature, top);
    }
}

INLINE LogitRow raw_row(const octavo::SampleArgs& a, int64_t r) {
    return {a.logits + r * a.row_stride * dtype_size(a.dtype), a.dtype, a.vocab};
}

static void sample_row(const octavo::SampleArgs& a, int64_t r) {
    LogitRow row = raw_row(a, r);
    a.token_ids[r] = 0;
    RowScan scanned = scan(row);
    a.finite[r] = scanned.finite;
    if (!scanned.finite) return;
    if (is_adjusted(a, r)) {
        auto copy = static_cast<float*>(
            octavo::thread_scratch(octavo::kRowScratch, (a.vocab + kLanes) * sizeof(float)));
        auto counts = static_cast<int32_t*>(
            octavo::thread_scratch(octavo::kCountScratch, (a.vocab + kLanes) * sizeof(int32_t)));
        each_vector(row, [&](int32_t id, F16 x) INLINE_BODY { store(copy + id, x); });
        adjust_logits(a, r, copy, counts);
        row = {copy, octavo::kF32, a.vocab};
        scanned = scan(row);
    }
    Best top = scanned.top;
    a.token_ids[r] = top.id;
    if (a.temperatures[r] <= 0 || top.value == -__builtin_inff()) return;
    UniformKey key(static_cast<uint64_t>(a.seeds[r]), static_cast<uint64_t>(a.positions[r]));
    if (a.top_ks[r] > 0 && a.top_ks[r] < a.vocab)
        a.token_ids[r] = draw_top_k(a, r, row, key, top);
    else if (a.top_ps[r] < 1)
        a.token_ids[r] = draw_top_p(a, r, row, key, top);
    else
        a.token_ids[r] = draw_from_row(row, key, a.temperatures[r], a.min_ps[r], top);
}

static void sample(const octavo::SampleArgs& a, Walk& walk) {
    parallel_for(walk, a.rows, [&](int64_t r) { sample_row(a, r); });
}

static void logprobs_row(const octavo::SampleArgs& a, const octavo::LogprobArgs& l, int64_t i) {
    int64_t r = l.rows ? l.rows[i] : i;
    LogitRow row = raw_row(a, r);
    float top = scan(row).top.value;
    float log_sum = log(static_cast<float>(sum_of_probabilities(row, top, 1.0f)));
    auto logprob = [&](float logit) { return logit - top - log_sum; };
    int64_t token = l.rows ? l.token_ids[r] : l.token_ids[i];
    l.token_logprobs[i] = logprob(row.scalar(static_cast<int32_t>(token)));
    if (!l.num_top) return;
    Best best[octavo::kMaxAlternatives];
    top_alternatives(row, l.num_top, best);
    for (int k = 0; k < l.num_top; k++) {
        l.top_ids[i * l.num_top + k] = best[k].id;
        l.top_logprobs[i * l.num_top + k] = logprob(best[k].value);
    }
}

static void logprobs(const octavo::SampleArgs& a, const octavo::LogprobArgs& l, Walk& walk) {
    parallel_for(walk, l.count, [&](int64_t i) { logprobs_row(a, l, i); });
}
