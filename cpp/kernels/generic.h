// The arithmetic of kernel.h, written once over the vector type `F` that the including file defines for its instruction
// set, beside its integer blocks and register budget. Included inside that file's own anonymous namespace, and without
// the standard library's inline functions: code compiled for a newer CPU must never be the copy the linker keeps for
// all.
#pragma once

// Two vectors as one; nests until there are kLanes lanes.
template <class Half>
struct Pair {
    static constexpr int lanes = 2 * Half::lanes;
    Half lo, hi;

    static Pair load(const float* p) { return {Half::load(p), Half::load(p + Half::lanes)}; }
    static Pair load_f16(const uint16_t* p) { return {Half::load_f16(p), Half::load_f16(p + Half::lanes)}; }
    static Pair set(float x) { return {Half::set(x), Half::set(x)}; }
    void store(float* p) const {
        lo.store(p);
        hi.store(p + Half::lanes);
    }
    int store_i8(int8_t* p) const { return lo.store_i8(p) + hi.store_i8(p + Half::lanes); }
    friend Pair operator+(Pair a, Pair b) { return {a.lo + b.lo, a.hi + b.hi}; }
    friend Pair operator-(Pair a, Pair b) { return {a.lo - b.lo, a.hi - b.hi}; }
    friend Pair operator*(Pair a, Pair b) { return {a.lo * b.lo, a.hi * b.hi}; }
    friend Pair operator/(Pair a, Pair b) { return {a.lo / b.lo, a.hi / b.hi}; }
    friend Pair fma(Pair a, Pair b, Pair c) { return {fma(a.lo, b.lo, c.lo), fma(a.hi, b.hi, c.hi)}; }
    friend Pair max(Pair a, Pair b) { return {max(a.lo, b.lo), max(a.hi, b.hi)}; }
    friend Pair min(Pair a, Pair b) { return {min(a.lo, b.lo), min(a.hi, b.hi)}; }
    friend Pair abs(Pair a) { return {abs(a.lo), abs(a.hi)}; }
    friend Pair round(Pair a) { return {round(a.lo), round(a.hi)}; }
    friend Pair exp2_int(Pair a) { return {exp2_int(a.lo), exp2_int(a.hi)}; }
    // Lane i with lane i + half, until one is left.
    friend float fold_sum(Pair a) { return fold_sum(a.lo + a.hi); }
    friend float fold_max(Pair a) { return fold_max(max(a.lo, a.hi)); }
};

template <class V, bool wide = V::lanes == kLanes>
struct Widened {
    using type = typename Widened<Pair<V>>::type;
};
template <class V>
struct Widened<V, true> {
    using type = V;
};
// The 16 lanes that reductions are defined over.
using Row = typename Widened<F>::type;
constexpr int kUnits = kLanes / F::lanes;

inline Row first_lanes(Row v, int count) {
    float a[kLanes];
    v.store(a);
    for (int i = count; i < kLanes; ++i) {
        a[i] = 0;
    }
    return Row::load(a);
}

// Cephes' expf: relative error about 1e-7 on [-87, 88], to which the argument is clamped.
template <class V>
inline V exp(V x) {
    x = min(max(x, V::set(-87.0f)), V::set(88.0f));
    const V n = round(x * V::set(1.44269504f));
    V r = fma(n, V::set(-0.693359375f), x);
    r = fma(n, V::set(2.12194440e-4f), r);
    V p = V::set(1.9875691500e-4f);
    p = fma(p, r, V::set(1.3981999507e-3f));
    p = fma(p, r, V::set(8.3334519073e-3f));
    p = fma(p, r, V::set(4.1665795894e-2f));
    p = fma(p, r, V::set(1.6666665459e-1f));
    p = fma(p, r, V::set(5.0000001201e-1f));
    p = fma(p, r * r, r) + V::set(1.0f);
    return p * exp2_int(n);
}

// GPT-2's GELU, x / 2 * (1 + tanh(u)) with u = sqrt(2 / pi) * (x + 0.044715 x^3), as x / (1 + exp(-2 u)).
template <class V>
inline V gelu(V x) {
    const V cubic = fma(x * x * x, V::set(0.044715f), x);
    return x / (V::set(1.0f) + exp(cubic * V::set(-1.59576912f)));
}

void layer_norm(const float* x, const float* weight, const float* bias, float eps, int cols, int padded_cols,
                float* y) {
    Row sum = Row::set(0);
    for (int i = 0; i < cols; i += kLanes) {
        sum = sum + Row::load(x + i);
    }
    const Row mean = Row::set(fold_sum(sum) / static_cast<float>(cols));
    Row squares = Row::set(0);
    for (int i = 0; i < cols; i += kLanes) {
        Row d = Row::load(x + i) - mean;
        if (cols - i < kLanes) {
            d = first_lanes(d, cols - i);
        }
        squares = fma(d, d, squares);
    }
    const Row rstd = Row::set(1.0f / __builtin_sqrtf(fold_sum(squares) / static_cast<float>(cols) + eps));
    for (int i = 0; i < padded_cols; i += kLanes) {
        fma((Row::load(x + i) - mean) * rstd, Row::load(weight + i), Row::load(bias + i)).store(y + i);
    }
}

inline float round_to_f16(float x) {
    uint16_t halves[F::lanes];
    F::set(x).store_f16(halves);
    float floats[F::lanes];
    F::load_f16(halves).store(floats);
    return floats[0];
}

// Scales are rounded as ggml rounds its own, which keeps the two engines' choices together; quants are not affected.
void quantize(const float* x, int cols, int row, const QuantizedRows& to) {
    static_assert(kBlock == 2 * kLanes, "a block is two rows of lanes");
    for (int b = 0; b < cols / kBlock; ++b, x += kBlock) {
        const size_t at = size_t(b) * to.n + row;
        // Rows that are multiplied in pairs lie in turns of eight bytes; one left over lies as all others do.
        const bool paired = kRowPairs && (row | 1) < to.n;
        int8_t own[kBlock];
        int8_t* out = paired ? own : to.quants + at * kBlock;
        const Row lo = Row::load(x), hi = Row::load(x + kLanes);
        const float largest = fold_max(max(abs(lo), abs(hi)));
        const Row inverse = Row::set(largest > 1e-30f ? 127.0f / largest : 0.0f);
        // The order of max's operands turns NaN into a number.
        const Row least = Row::set(-127), most = Row::set(127);
        const int first = min(max(lo * inverse, least), most).store_i8(out);
        const int second = min(max(hi * inverse, least), most).store_i8(out + kLanes);
        for (int i = 0; paired && i < kBlock; i += 8) {
            __builtin_memcpy(to.quants + (at - row % 2) * kBlock + row % 2 * 8 + 2 * i, own + i, 8);
        }
        const float scale = round_to_f16(largest / 127.0f);
        const int zero = zero_point(to.packing);
        const bool halves = to.packing == Packing::q6_k;
        to.factors[at] = {scale,
                          scale * static_cast<float>(first + second),
                          {-zero * (halves ? first : first + second), -zero * second}};
    }
}

void to_f16(const float* x, int n, uint16_t* out) {
    int i = 0;
    for (; i + F::lanes <= n; i += F::lanes) {
        F::load(x + i).store_f16(out + i);
    }
    if (i < n) {
        float rest[F::lanes] = {};
        uint16_t halves[F::lanes];
        __builtin_memcpy(rest, x + i, (n - i) * sizeof(float));
        F::load(rest).store_f16(halves);
        __builtin_memcpy(out + i, halves, (n - i) * sizeof(uint16_t));
    }
}

// NaN counts as absent: where max() meets one it returns its second operand.
void run_max(const float* x, int n, float* maxima) {
    for (int i = 0; i < n; i += 4 * kLanes) {
        Row most = Row::set(-__builtin_inff());
        for (int j = 0; j < 4; ++j) {
            most = max(Row::load(x + i + j * kLanes), most);
        }
        *maxima++ = fold_max(most);
    }
}

double sum_exp(const float* x, int n, float top, float factor) {
    const Row t = Row::set(top), f = Row::set(factor);
    double total = 0;
    // Few enough at a time that float rounds nothing that matters.
    for (int i = 0; i < n;) {
        Row sum = Row::set(0);
        for (const int end = n - i < 32 * kLanes ? n : i + 32 * kLanes; i < end; i += kLanes) {
            sum = sum + exp((Row::load(x + i) - t) * f);
        }
        total += static_cast<double>(fold_sum(sum));
    }
    return total;
}

uint64_t read_bytes(const uint8_t* data, size_t bytes) {
    uint64_t sums[8] = {};
    const uint64_t* words = reinterpret_cast<const uint64_t*>(data);
    for (size_t i = 0; i + 8 <= bytes / 8; i += 8) {
        for (int j = 0; j < 8; ++j) {
            sums[j] += words[i + j];
        }
    }
    uint64_t total = 0;
    for (const uint64_t s : sums) {
        total += s;
    }
    return total;
}

// ---- Matrix products. A unit is F::lanes outputs: a whole group, or a part of one where vectors are shorter. ----

inline void finish(F sum, const Epilogue& e, int row, int unit) {
    const size_t column = size_t(unit) * F::lanes, at = row * e.stride + column;
    if (e.bias) {
        sum = sum + F::load(e.bias + column);
    }
    if (e.gelu) {
        sum = gelu(sum);
    }
    if (e.residual) {
        sum = sum + F::load(e.residual + at);
    }
    sum.store(e.out + at);
}

// What a file with kRowPairs adds to dot_words(): out[r] = offsets[r] + the products of row r of a pair, whose quants
// lie at x as quantize() stores them.
template <int bits, int count>
void dot_words_of_two(const Bytes* words, const int8_t* x, const int32_t (&offsets)[2], F (&out)[2]);

// The unsigned weights of one unit and block: words[i] has inputs 4 i to 4 i + 3 of every lane. Above four bits, the
// fifth bits are one more vector of bytes, bit i for words[i]; the fifth and sixth are two, with two bits for each
// word.
template <int bits>
struct Quants {
    static constexpr int bytes = kLanes * (bits == 8 ? kBlock : kBlock / 2 + 4 * (bits - 4));
    Bytes words[8];

    Quants(const uint8_t* data, int part) {
        data += part * F::lanes * 4;
        if constexpr (bits == 8) {
#pragma GCC unroll 8
            for (int i = 0; i < 8; ++i) {
                words[i] = Bytes::load(data + 4 * kLanes * i);
            }
        } else {
            const Bytes nibble = Bytes::set(15);
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) {
                const Bytes both = Bytes::load(data + 4 * kLanes * i);
                words[i] = both & nibble;
                words[i + 4] = shift<-4>(both) & nibble;
            }
            if constexpr (bits == 5) {
                add_bits<1, 8>(words, Bytes::load(data + 16 * kLanes));
            } else if constexpr (bits == 6) {
                add_bits<2, 4>(words, Bytes::load(data + 16 * kLanes));
                add_bits<2, 4>(words + 4, Bytes::load(data + 20 * kLanes));
            }
        }
    }

    // Of each row the products with 32 inputs, or with the 16 of either half, and its offset.
    template <int rows>
    void dot(const int8_t* x, const BlockFactors* row, F (&out)[rows]) const {
        dot_from<0, 8, 0>(x, row, out);
    }
    template <int rows>
    void dot_first(const int8_t* x, const BlockFactors* row, F (&out)[rows]) const {
        dot_from<0, 4, 0>(x, row, out);
    }
    template <int rows>
    void dot_second(const int8_t* x, const BlockFactors* row, F (&out)[rows]) const {
        dot_from<4, 4, 1>(x, row, out);
    }
    // Without an offset.
    template <int rows>
    void dot_only(const int8_t* x, const BlockFactors* row, F (&out)[rows]) const {
        dot_from<0, 8, -1>(x, row, out);
    }

private:
    template <int first, int count, int offset, int rows>
    void dot_from(const int8_t* x, const BlockFactors* row, F (&out)[rows]) const {
        int32_t offsets[rows] = {};
        for (int r = 0; offset >= 0 && r < rows; ++r) {
            offsets[r] = row[r].offsets[offset < 0 ? 0 : offset];
        }
        if constexpr (rows == 1) {
            out[0] = dot_words<bits, count>(words + first, x + 4 * first, offsets[0]);
        } else {
            dot_words_of_two<bits, count>(words + first, x + 8 * first, offsets, out);
        }
    }

    // Bits 4 and up of each word, `width` of them at a time from `high`.
    template <int width, int count, int i = 0>
    static void add_bits(Bytes* words, Bytes high) {
        words[i] = words[i] | (shift<4 - width * i>(high) & Bytes::set(width == 1 ? 0x10 : 0x30));
        if constexpr (i + 1 < count) {
            add_bits<width, count, i + 1>(words, high);
        }
    }
};

inline F load_part(const uint8_t* halves, int part) {
    return F::load_f16(reinterpret_cast<const uint16_t*>(halves) + part * F::lanes);
}

template <int rows>
inline void add_scaled(F* sum, F scale, const BlockFactors* row, const F (&dot)[rows]) {
    for (int r = 0; r < rows; ++r) {
        sum[r] = fma(scale * F::set(row[r].scale), dot[r], sum[r]);
    }
}

// The blocks of the packings. Each covers kBlock inputs and adds its products with some rows, one or a pair, to their
// sums; `Header` is what several in a row share.
struct NoHeader {
    static constexpr int bytes = 0, blocks = 1;
    NoHeader(const uint8_t*, int) {}
};

// weight = scale * (quant - zero point)
template <int bits>
struct OffsetBlock {
    using Header = NoHeader;
    static constexpr int bytes = 2 * kLanes + Quants<bits>::bytes;
    F scale;
    Quants<bits> quants;

    OffsetBlock(const Header&, const uint8_t* data, int part)
        : scale(load_part(data, part)), quants(data + 2 * kLanes, part) {}
    template <int rows>
    void add(F* sum, const int8_t* x, const BlockFactors* row) const {
        F dot[rows];
        quants.dot(x, row, dot);
        add_scaled(sum, scale, row, dot);
    }
};

// weight = scale * quant + minimum
template <int bits>
struct MinimumBlock {
    using Header = NoHeader;
    static constexpr int bytes = 4 * kLanes + Quants<bits>::bytes;
    F scale, minimum;
    Quants<bits> quants;

    MinimumBlock(const Header&, const uint8_t* data, int part)
        : scale(load_part(data, part)), minimum(load_part(data + 2 * kLanes, part)), quants(data + 4 * kLanes, part) {}
    template <int rows>
    void add(F* sum, const int8_t* x, const BlockFactors* row) const {
        F dot[rows];
        quants.dot_only(x, row, dot);
        for (int r = 0; r < rows; ++r) {
            sum[r] = fma(minimum, F::set(row[r].sum), sum[r]);
        }
        add_scaled(sum, scale, row, dot);
    }
};

// weight = header scale * block scale * quant - header minimum * block minimum
template <int bits>
struct SuperMinimumBlock {
    struct Header {
        static constexpr int bytes = 4 * kLanes, blocks = 8;
        F scale, minus_minimum;
        Header(const uint8_t* data, int part)
            : scale(load_part(data, part)), minus_minimum(F::set(-1) * load_part(data + 2 * kLanes, part)) {}
    };
    static constexpr int bytes = 2 * kLanes + Quants<bits>::bytes;
    F scale, minimum;
    Quants<bits> quants;

    SuperMinimumBlock(const Header& header, const uint8_t* data, int part)
        : scale(header.scale * F::load_u8(data + part * F::lanes)),
          minimum(header.minus_minimum * F::load_u8(data + kLanes + part * F::lanes)),
          quants(data + 2 * kLanes, part) {}
    template <int rows>
    void add(F* sum, const int8_t* x, const BlockFactors* row) const {
        F dot[rows];
        quants.dot_only(x, row, dot);
        for (int r = 0; r < rows; ++r) {
            sum[r] = fma(minimum, F::set(row[r].sum), sum[r]);
        }
        add_scaled(sum, scale, row, dot);
    }
};

// weight = header scale * scale of the half block * (quant - zero point)
struct HalvesBlock {
    struct Header {
        static constexpr int bytes = 2 * kLanes, blocks = 8;
        F scale;
        Header(const uint8_t* data, int part) : scale(load_part(data, part)) {}
    };
    static constexpr int bytes = 2 * kLanes + Quants<6>::bytes;
    F scale, first, second;
    Quants<6> quants;

    HalvesBlock(const Header& header, const uint8_t* data, int part)
        : scale(header.scale),
          first(F::load_i8(data + part * F::lanes)),
          second(F::load_i8(data + kLanes + part * F::lanes)),
          quants(data + 2 * kLanes, part) {}
    template <int rows>
    void add(F* sum, const int8_t* x, const BlockFactors* row) const {
        F dot[rows], second_dot[rows];
        quants.dot_first(x, row, dot);
        quants.dot_second(x, row, second_dot);
        for (int r = 0; r < rows; ++r) {
            // Exact: both products and their sum are integers below 2^24.
            dot[r] = fma(second_dot[r], second, dot[r] * first);
        }
        add_scaled(sum, scale, row, dot);
    }
};

uint64_t dots(int rounds) {
    constexpr int rows = 8;
    alignas(64) uint8_t weights[Quants<4>::bytes] = {};
    alignas(64) int8_t x[rows * kBlock] = {};
    constexpr int together = kRowPairs ? 2 : 1;
    const BlockFactors factors[together] = {};
    const Quants<4> quants(weights, 0);
    F sums[rows];
    for (F& sum : sums) {
        sum = F::set(0);
    }
    for (int round = 0; round < rounds; ++round) {
        // The compiler must not find out that every round is the same.
        asm volatile("" : : "r"(x) : "memory");
#pragma GCC unroll 8
        for (int r = 0; r < rows; r += together) {
            F dot[together];
            quants.dot_only(x + r * kBlock, factors, dot);
            for (int i = 0; i < together; ++i) {
                sums[r + i] = sums[r + i] + dot[i];
            }
        }
    }
    float total = 0;
    for (const F sum : sums) {
        float lanes[F::lanes];
        sum.store(lanes);
        total += lanes[0];
    }
    asm volatile("" : : "m"(total));
    return uint64_t(rounds) * rows * kBlock * F::lanes;
}

// Every `step`th line of what comes kPrefetchBlocks blocks later.
template <class Block>
inline void prefetch(const uint8_t* data, int bytes, int first, int step) {
    if constexpr (kPrefetchBlocks > 0) {
        for (int line = first; 64 * line < bytes; line += step) {
            __builtin_prefetch(data + kPrefetchBlocks * Block::bytes + 64 * line, 0, kPrefetchLocality);
        }
    }
}

// Adds a block of every row to its sum.
template <class Block, int rows>
inline void add_rows(const Block& block, F* sum, const int8_t* quants, const BlockFactors* factors) {
    constexpr int paired = kRowPairs ? rows / 2 * 2 : 0;
    if constexpr (paired > 0) {
#pragma GCC unroll 16
        for (int r = 0; r < paired; r += 2) {
            block.template add<2>(sum + r, quants + r * kBlock, factors + r);
        }
    }
#pragma GCC unroll 16
    for (int r = paired; r < rows; ++r) {
        block.template add<1>(sum + r, quants + r * kBlock, factors + r);
    }
}

// A group times `rows` rows of int8 activations; the weights of a block are loaded once for all of them. Units take
// turns after a few blocks, so that weights come from memory evenly and once.
template <class Block, int rows>
void integer_tile(const uint8_t* group, int g, const Activations& x, int row, const Epilogue& e) {
    using Header = typename Block::Header;
    constexpr int turn = kUnits == 1 ? Header::blocks : 8;
    static_assert(Header::blocks == 1 || Header::blocks == turn, "a turn takes one header");
    const int8_t* quants = x.quantized.quants + size_t(row) * kBlock;
    const BlockFactors* factors = x.quantized.factors + row;
    F sums[kUnits][rows];
    for (int part = 0; part < kUnits; ++part) {
#pragma GCC unroll 16
        for (int r = 0; r < rows; ++r) {
            sums[part][r] = F::set(0);
        }
    }
    for (int left = x.cols / kBlock; left > 0; left -= turn) {
        const int blocks = turn > Header::blocks && left < turn ? left : turn;
        for (int part = 0; part < kUnits; ++part) {
            F sum[rows];
#pragma GCC unroll 16
            for (int r = 0; r < rows; ++r) {
                sum[r] = sums[part][r];
            }
            const Header header(group, part);
            prefetch<Block>(group, Header::bytes, part, kUnits);
            const uint8_t* data = group + Header::bytes;
            const int8_t* q = quants;
            const BlockFactors* f = factors;
            for (int b = 0; b < blocks; ++b) {
                const Block block(header, data, part);
                prefetch<Block>(data, Block::bytes, part, kUnits);
                add_rows<Block, rows>(block, sum, q, f);
                data += Block::bytes;
                q += size_t(x.n) * kBlock;
                f += x.n;
            }
#pragma GCC unroll 16
            for (int r = 0; r < rows; ++r) {
                sums[part][r] = sum[r];
            }
        }
        group += Header::bytes + blocks * Block::bytes;
        quants += size_t(blocks) * x.n * kBlock;
        factors += size_t(blocks) * x.n;
    }
    for (int part = 0; part < kUnits; ++part) {
#pragma GCC unroll 16
        for (int r = 0; r < rows; ++r) {
            finish(sums[part][r], e, row + r, g * kUnits + part);
        }
    }
}

template <class Block, int rows>
inline void integer_rows(const uint8_t* group, int g, const Activations& x, int row, int n, const Epilogue& e) {
    if constexpr (rows == kIntegerRows) {
        for (; n >= rows; n -= rows, row += rows) {
            integer_tile<Block, rows>(group, g, x, row, e);
        }
    } else if (n == rows) {
        integer_tile<Block, rows>(group, g, x, row, e);
        return;
    }
    if constexpr (rows > 1) {
        integer_rows<Block, rows - 1>(group, g, x, row, n, e);
    }
}

template <class Block>
void integer_matmul(const uint8_t* weights, int first, int last, const Activations& x, const Epilogue& e) {
    using Header = typename Block::Header;
    const size_t group_bytes =
        size_t(x.cols / kBlock) * Block::bytes + size_t(x.cols / kBlock / Header::blocks) * Header::bytes;
    for (int g = first; g < last; ++g) {
        integer_rows<Block, kIntegerRows>(weights + g * group_bytes, g, x, 0, x.n, e);
    }
}

// `units` units times `rows` rows of float activations: enough sums in flight to hide the latency of a multiply-add.
template <class Weight, int units, int rows>
void float_tile(const typename Weight::type* weights, int unit, const Activations& x, int row, const Epilogue& e) {
    const typename Weight::type* base[units];
    F sum[units][rows];
#pragma GCC unroll 8
    for (int u = 0; u < units; ++u) {
        base[u] = weights + size_t((unit + u) / kUnits) * x.cols * kLanes + (unit + u) % kUnits * F::lanes;
#pragma GCC unroll 16
        for (int r = 0; r < rows; ++r) {
            sum[u][r] = F::set(0);
        }
    }
    const float* values = x.values + size_t(row) * x.cols;
    for (int i = 0; i < x.cols; ++i) {
        F w[units];
#pragma GCC unroll 8
        for (int u = 0; u < units; ++u) {
            w[u] = Weight::load(base[u] + size_t(i) * kLanes);
        }
#pragma GCC unroll 16
        for (int r = 0; r < rows; ++r) {
            const F value = F::set(values[size_t(r) * x.cols + i]);
#pragma GCC unroll 8
            for (int u = 0; u < units; ++u) {
                sum[u][r] = fma(w[u], value, sum[u][r]);
            }
        }
    }
#pragma GCC unroll 8
    for (int u = 0; u < units; ++u) {
#pragma GCC unroll 16
        for (int r = 0; r < rows; ++r) {
            finish(sum[u][r], e, row + r, unit + u);
        }
    }
}

template <class Weight, int rows>
void float_rows(const typename Weight::type* weights, int first, int last, const Activations& x, int row, int n,
                const Epilogue& e) {
    const auto tile = [&](int at) {
        constexpr int units = kFloatSums / rows > 4 ? 4 : (kFloatSums / rows > 0 ? kFloatSums / rows : 1);
        int unit = first;
        for (; unit + units <= last; unit += units) {
            float_tile<Weight, units, rows>(weights, unit, x, at, e);
        }
        for (; unit < last; ++unit) {
            float_tile<Weight, 1, rows>(weights, unit, x, at, e);
        }
    };
    if constexpr (rows == kFloatRows) {
        for (; n >= rows; n -= rows, row += rows) {
            tile(row);
        }
    } else if (n == rows) {
        tile(row);
        return;
    }
    if constexpr (rows > 1) {
        float_rows<Weight, rows - 1>(weights, first, last, x, row, n, e);
    }
}

template <class Weight>
void float_matmul(const uint8_t* weights, int first, int last, const Activations& x, const Epilogue& e) {
    const auto* w = reinterpret_cast<const typename Weight::type*>(weights);
    float_rows<Weight, kFloatRows>(w, first * kUnits, last * kUnits, x, 0, x.n, e);
}

struct WeightF32 {
    using type = float;
    static F load(const float* p) { return F::load(p); }
};
struct WeightF16 {
    using type = uint16_t;
    static F load(const uint16_t* p) { return F::load_f16(p); }
};
struct WeightBf16 {
    using type = uint16_t;
    static F load(const uint16_t* p) { return F::load_bf16(p); }
};

// ---- Attention ----

// Raw scores of `rows` rows against `blocks` blocks of cells. A score is one chain over the head's dimensions, so it
// does not depend on the lane its cell lies in.
template <int rows, int blocks>
void score_tile(const HeadPass& p, int row, int block, float* scores, size_t stride) {
    constexpr int units = blocks * kUnits;
    F sum[rows][units];
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 16
        for (int u = 0; u < units; ++u) {
            sum[r][u] = F::set(0);
        }
    }
    const uint16_t* k = p.k + size_t(block) * p.head_dim * kLanes;
    // The values of these cells are wanted next, and take as long to come as the keys.
    const uint16_t* v = p.v + size_t(block) * p.head_dim * kLanes;
    for (int d = 0; d < p.head_dim; ++d) {
#pragma GCC unroll 16
        for (int u = 0; u < units; ++u) {
            const size_t first = size_t(u / kUnits) * p.head_dim;
            if (u % (2 * kUnits) == 0) {
                __builtin_prefetch(v + (first + 2 * d) * kLanes, 0, 2);
            }
            const F key = F::load_f16(k + (first + d) * kLanes + u % kUnits * F::lanes);
#pragma GCC unroll 8
            for (int r = 0; r < rows; ++r) {
                sum[r][u] = fma(F::set(p.q[(row + r) * p.q_stride + d]), key, sum[r][u]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 16
        for (int u = 0; u < units; ++u) {
            sum[r][u].store(scores + r * stride + size_t(block) * kLanes + u * F::lanes);
        }
    }
}

// Turns raw scores into weights that sum to the returned number; lanes go by position, not by cell.
inline float soften(float* scores, int length, float scale) {
    const int end = (length + kLanes - 1) / kLanes * kLanes;
    for (int i = length; i < end; ++i) {
        scores[i] = -__builtin_inff();
    }
    Row most = Row::load(scores);
    for (int i = kLanes; i < end; i += kLanes) {
        most = max(Row::load(scores + i), most);
    }
    const Row top = Row::set(fold_max(most)), factor = Row::set(scale);
    Row sum = Row::set(0);
    for (int i = 0; i < end; i += kLanes) {
        Row w = exp((Row::load(scores + i) - top) * factor);
        if (length - i < kLanes) {
            w = first_lanes(w, length - i);
        }
        w.store(scores + i);
        sum = sum + w;
    }
    return fold_sum(sum);
}

// Weighted sums of values for `rows` rows and `vectors` vectors of dimensions from `dim` on: the cells that all rows
// share are loaded once, then each row goes on alone.
template <int rows, int vectors>
void mix_tile(const HeadPass& p, int row, int dim, const float* weights, size_t stride, const float* inverse_sums) {
    const size_t v_stride = (p.head_dim + kLanes - 1) / kLanes * kLanes;
    const uint16_t* v = p.v + dim;
    int shared = p.rows[row].direct;
    for (int r = 1; r < rows; ++r) {
        shared = p.rows[row + r].direct < shared ? p.rows[row + r].direct : shared;
    }
    constexpr int units = vectors * kUnits;
    F sum[rows][units];
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 16
        for (int u = 0; u < units; ++u) {
            sum[r][u] = F::set(0);
        }
    }
    for (int c = 0; c < shared; ++c) {
        if (row == 0 && dim == 0 && p.upcoming) {
            __builtin_prefetch(p.upcoming + size_t(c) * p.head_dim, 0, 2);
            __builtin_prefetch(p.upcoming + size_t(c) * p.head_dim + p.head_dim / 2, 0, 2);
        }
#pragma GCC unroll 16
        for (int u = 0; u < units; ++u) {
            const F value = F::load_f16(v + c * v_stride + u * F::lanes);
#pragma GCC unroll 8
            for (int r = 0; r < rows; ++r) {
                sum[r][u] = fma(F::set(weights[r * stride + c]), value, sum[r][u]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
        const RowContext& context = p.rows[row + r];
        for (int c = shared; c < context.length; ++c) {
            const size_t cell = c < context.direct ? c : context.tail[c - context.direct];
#pragma GCC unroll 16
            for (int u = 0; u < units; ++u) {
                const F value = F::load_f16(v + cell * v_stride + u * F::lanes);
                sum[r][u] = fma(F::set(weights[r * stride + c]), value, sum[r][u]);
            }
        }
        float parts[units * F::lanes];
#pragma GCC unroll 16
        for (int u = 0; u < units; ++u) {
            (sum[r][u] * F::set(inverse_sums[r])).store(parts + u * F::lanes);
        }
        const int count = p.head_dim - dim < units * F::lanes ? p.head_dim - dim : units * F::lanes;
        __builtin_memcpy(p.out + (row + r) * p.out_stride + dim, parts, count * sizeof(float));
    }
}

template <int rows>
void attend_rows(const HeadPass& p, int row) {
    int cells = 0;
    for (int r = 0; r < rows; ++r) {
        const RowContext& context = p.rows[row + r];
        cells = context.direct > cells ? context.direct : cells;
        for (int i = 0; i < context.length - context.direct; ++i) {
            cells = context.tail[i] + 1 > cells ? context.tail[i] + 1 : cells;
        }
    }
    const int blocks = (cells + kLanes - 1) / kLanes;
    const size_t stride = (p.num_cells + kLanes - 1) / kLanes * kLanes;
    float* scores = p.scratch;
    float* gathered = p.scratch + rows * stride;
    constexpr int wide = kScoreSums / rows < 8 ? kScoreSums / rows : 8;
    int block = 0;
    for (; block + wide <= blocks; block += wide) {
        score_tile<rows, wide>(p, row, block, scores, stride);
    }
    for (; block < blocks; ++block) {
        score_tile<rows, 1>(p, row, block, scores, stride);
    }
    float inverse_sums[rows];
    for (int r = 0; r < rows; ++r) {
        const RowContext& context = p.rows[row + r];
        float* s = scores + r * stride;
        for (int i = 0; i < context.length - context.direct; ++i) {
            gathered[i] = s[context.tail[i]];
        }
        for (int i = 0; i < context.length - context.direct; ++i) {
            s[context.direct + i] = gathered[i];
        }
        inverse_sums[r] = 1.0f / soften(s, context.length, 1.0f / __builtin_sqrtf(static_cast<float>(p.head_dim)));
    }
    int dim = 0;
    constexpr int vectors = kMixSums / rows < 4 ? kMixSums / rows : 4;
    for (; dim + vectors * kLanes <= p.head_dim; dim += vectors * kLanes) {
        mix_tile<rows, vectors>(p, row, dim, scores, stride, inverse_sums);
    }
    for (; dim < p.head_dim; dim += kLanes) {
        mix_tile<rows, 1>(p, row, dim, scores, stride, inverse_sums);
    }
}

template <int rows>
void attend_from(const HeadPass& p, int row) {
    if constexpr (rows == kAttendRows) {
        for (; p.n - row >= rows; row += rows) {
            attend_rows<rows>(p, row);
        }
    } else if (p.n - row == rows) {
        attend_rows<rows>(p, row);
        return;
    }
    if constexpr (rows > 1) {
        attend_from<rows - 1>(p, row);
    }
}

void attend(const HeadPass& p) {
    static_assert(kAttendRows <= kMostAttendRows, "attention_scratch() has room for so many rows");
    attend_from<kAttendRows>(p, 0);
}

// The table of everything above.
constexpr Kernel make_kernel(const char* name, bool (*supported)()) {
    return {
        name,
        supported,
        kRowPairs,
        {float_matmul<WeightF32>, float_matmul<WeightF16>, float_matmul<WeightBf16>, integer_matmul<OffsetBlock<8>>,
         integer_matmul<OffsetBlock<4>>, integer_matmul<MinimumBlock<4>>, integer_matmul<OffsetBlock<5>>,
         integer_matmul<MinimumBlock<5>>, integer_matmul<SuperMinimumBlock<4>>, integer_matmul<SuperMinimumBlock<5>>,
         integer_matmul<HalvesBlock>},
        layer_norm,
        quantize,
        to_f16,
        attend,
        run_max,
        sum_exp,
        read_bytes,
        dots,
    };
}
