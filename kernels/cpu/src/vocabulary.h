// Passes over one row of logits: maximum and finite check, sum of probabilities, best alternatives, uniform numbers.
#pragma once
#include "vmath.h"

// A row of logits in memory, of any type; read as fp32. -0 is read as +0, so that equal means tied.
struct LogitRow {
    const void* data;
    int dtype;
    int32_t vocab;

    INLINE_MEMBER float scalar(int32_t id) const {
        float lanes[kLanes];
        store(lanes, add(load_some(data, id, dtype, 1), zero()));
        return lanes[0];
    }
};

template <int TYPE, class Visit>
INLINE void each_vector_of(const LogitRow& row, const Visit& visit) {
    int32_t id = 0;
    for (; id + kLanes <= row.vocab; id += kLanes) visit(id, add(load_as(row.data, id, TYPE), zero()));
    if (id == row.vocab) return;
    F16 x = add(load_some(row.data, id, TYPE, row.vocab - id), zero());
    M16 inside = less(to_float(lane_numbers()), set1(static_cast<float>(row.vocab - id)));
    visit(id, select(inside, x, set1(-__builtin_inff())));
}

// Calls visit(first id, 16 logits) along the row; lanes past the vocabulary are -inf.
template <class Visit>
INLINE void each_vector(const LogitRow& row, const Visit& visit) {
    if (row.dtype == octavo::kBf16) return each_vector_of<octavo::kBf16>(row, visit);
    if (row.dtype == octavo::kF16) return each_vector_of<octavo::kF16>(row, visit);
    each_vector_of<octavo::kF32>(row, visit);
}

struct Best {
    float value;
    int32_t id;
};

// Per lane, the highest value so far and the first id that had it.
struct BestLanes {
    F16 values = set1(-__builtin_inff());
    I16 ids = iset1(INT32_MAX);

    INLINE_MEMBER void update(F16 x, I16 at) {
        M16 better = less(values, x);
        values = select(better, x, values);
        ids = iselect(better, at, ids);
    }
    // Ties go to the lowest id; id 0 when every value is -inf.
    INLINE_MEMBER Best reduce() const {
        float v[kLanes];
        int32_t at[kLanes];
        store(v, values);
        istore(at, ids);
        Best best = {v[0], at[0]};
        for (int i = 1; i < kLanes; i++)
            if (v[i] > best.value || (v[i] == best.value && at[i] < best.id)) best = {v[i], at[i]};
        if (best.id == INT32_MAX) best.id = 0;
        return best;
    }
};

// The likeliest id of a row, and whether every logit of it is finite.
struct RowScan {
    Best top;
    bool finite;
};

INLINE RowScan scan(const LogitRow& row) {
    // An exponent of all ones says infinity or NaN; -inf past the vocabulary is none of the row's.
    const I16 exponent = iset1(0x7F800000);
    const int32_t whole = row.vocab / kLanes * kLanes;
    BestLanes lanes;
    F16 worst = zero();
    each_vector(row, [&](int32_t id, F16 x) INLINE_BODY {
        lanes.update(x, iadd(iset1(id), lane_numbers()));
        if (id < whole) worst = max(worst, from_bits(iand(bits(x), exponent)));
    });
    if (whole < row.vocab) {
        F16 rest = load_some(row.data, whole, row.dtype, row.vocab - whole);
        worst = max(worst, from_bits(iand(bits(rest), exponent)));
    }
    return {lanes.reduce(), reduce_max(worst) < __builtin_inff()};
}

// exp((logit - top) / temperature) relative to the likeliest; `rate` is log2(e) / temperature.
INLINE F16 relative_probability(F16 logits, F16 top, F16 rate) { return exp2(mul(sub(logits, top), rate)); }

// Their sum over the row: 16 lanes over 1,024 ids at a time, the runs in double.
INLINE double sum_of_probabilities(const LogitRow& row, float top, float temperature) {
    F16 lanes = zero(), highest = set1(top), rate = set1(kLog2E / temperature);
    double sum = 0;
    int run = 0;
    each_vector(row, [&](int32_t, F16 x) INLINE_BODY {
        lanes = add(lanes, relative_probability(x, highest, rate));
        if (++run == 64) sum += reduce_add(lanes), lanes = zero(), run = 0;
    });
    return sum + reduce_add(lanes);
}

// The `count` likeliest, in order, ties by lowest id.
INLINE void top_alternatives(const LogitRow& row, int count, Best* to) {
    int held = 0;
    each_vector(row, [&](int32_t id, F16 x) INLINE_BODY {
        float border = held < count ? -__builtin_inff() : to[count - 1].value;
        if (held == count && !any(less(set1(border), x))) return;
        float lanes[kLanes];
        store(lanes, x);
        for (int i = 0; i < kLanes && id + i < row.vocab; i++) {
            if (held == count && !(lanes[i] > to[count - 1].value)) continue;
            int at = held < count ? held++ : count - 1;
            for (; at > 0 && to[at - 1].value < lanes[i]; at--) to[at] = to[at - 1];
            to[at] = {lanes[i], id + i};
        }
    });
    for (; held < count; held++) to[held] = {-__builtin_inff(), 0};
}

INLINE I16 lowbias32(I16 x) {
    x = imul(ixor(x, shr<16>(x)), iset1(0x7FEB352D));
    x = imul(ixor(x, shr<15>(x)), iset1(static_cast<int32_t>(0x846CA68B)));
    return ixor(x, shr<16>(x));
}

// Keys of the uniform numbers of one request and position; see kernels.api.uniforms.
struct UniformKey {
    int32_t low, high;

    UniformKey(uint64_t seed, uint64_t position) {
        uint64_t x = seed + 0x9E3779B97F4A7C15u * (position + 1);
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
        x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
        x ^= x >> 31;
        low = static_cast<int32_t>(x), high = static_cast<int32_t>(x >> 32);
    }
    INLINE_MEMBER F16 uniforms(I16 ids) const {
        I16 x = lowbias32(ixor(lowbias32(ixor(ids, iset1(low))), iset1(high)));
        return mul(add(to_float(shr<9>(x)), set1(0.5f)), set1(0x1p-23f));
    }
};

INLINE F16 gumbels(F16 uniforms) {
    F16 exponential = sub(zero(), log(uniforms));
    return sub(zero(), log(exponential));
}

// Which lanes may reach a Gumbel number of `short_by` and more, none being too few: from -ln u >= 1 - u follows
// 1 - u < exp(-short_by), here bounded from above by a power of two. Spares the logarithms of nearly every id.
INLINE M16 may_reach(F16 uniforms, F16 short_by) {
    F16 exponent = max(set1(-126.0f), min(set1(126.0f), sub(set1(0.51f), mul(short_by, set1(kLog2E)))));
    F16 bound = from_bits(shl<23>(iadd(round_to_int(exponent), iset1(127))));
    return less(sub(set1(1.0f), uniforms), bound);
}
