/* The kernels of histogram_kernel.py in C, without the GIL. They count float32 values in the bins of a table, compute the
 * squared error of scales and zero points from such counts, compute the squared difference of float32 arrays, and search
 * scales and zero points of blocks of weights.
 *
 * The code uses only the stable interface of Python 3.11, and reads arrays through the buffer interface, so that one build
 * works with every later Python and every numpy.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>
#include <string.h>
#ifndef _WIN32
#include <signal.h>
#include <stdatomic.h>
#include <unistd.h>
#endif

#ifdef __GNUC__
#define SOON(place) __builtin_prefetch(place)
#else
#define SOON(place) ((void)(place))
#endif

#if defined(__GNUC__) && defined(__x86_64__)
#define HAS_AVX2
#define INLINE inline __attribute__((always_inline))
#else
#define INLINE inline
#endif

enum {
    CHUNK = 2048, /* values that both loops below process in turn; they fit into the L1 cache */
    LINE = 16,    /* values in a cache line */
    LANES = 32,   /* parallel limits; with 16, gcc 12 splits the loop over them, which is half as fast */
    SPARE = 3     /* additional entries of bin 0 after the last bin */
};

static const uint64_t ONE = (uint64_t)1 << 40; /* counts are above this bit, sums below */

/* Widen the limits of each lane. NaN changes neither. */
static void widen(float *lows, float *highs, const float *values, Py_ssize_t n)
{
    float low[LANES], high[LANES]; /* local, so that the compiler knows that values do not alias them */
    memcpy(low, lows, sizeof low);
    memcpy(high, highs, sizeof high);
    Py_ssize_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int k = 0; k < LANES; k++) {
            const float value = values[i + k];
            low[k] = value < low[k] ? value : low[k];
            high[k] = value > high[k] ? value : high[k];
        }
    for (; i < n; i++) {
        low[0] = values[i] < low[0] ? values[i] : low[0];
        high[0] = values[i] > high[0] ? values[i] : high[0];
    }
    memcpy(lows, low, sizeof low);
    memcpy(highs, high, sizeof high);
}

/* Add each value to the entry of its bin. Three of four zeros go to the spare entries: an addition waits for the previous
 * one to the same entry, and zeros are frequent after a ReLU. Meanwhile the next chunk is prefetched.
 */
static void count(uint64_t *table, const float *values, Py_ssize_t n, int shift)
{
    const uint32_t bins = (uint32_t)1 << (32 - shift), dropped = ((uint32_t)1 << shift) - 1;
    uint32_t pattern;
    Py_ssize_t i = 0;
    for (; i + LINE <= n; i += LINE) {
        SOON(values + i + CHUNK);
        for (int k = 0; k < LINE; k++) {
            memcpy(&pattern, values + i + k, sizeof pattern);
            uint32_t bin = pattern >> shift;
            if (k % (SPARE + 1))
                bin = bin ? bin : bins + k % (SPARE + 1) - 1;
            table[bin] += ONE | (pattern & dropped);
        }
    }
    for (; i < n; i++) {
        memcpy(&pattern, values + i, sizeof pattern);
        table[pattern >> shift] += ONE | (pattern & dropped);
    }
}

/* Return 1 if no NaN or infinity was counted: the largest exponent has no entries for either sign. */
static int all_finite(const uint64_t *table, int shift)
{
    const size_t half = (size_t)1 << (31 - shift), largest = (size_t)1 << (23 - shift);
    uint64_t any = 0;
    for (size_t i = half - largest; i < half; i++)
        any |= table[i] | table[half + i];
    return !any;
}

/* Add NaN to a lane for each value that is not finite, and 0 for others. */
static void spoil(float *lanes, const float *values, Py_ssize_t n)
{
    float odd[LANES];
    memcpy(odd, lanes, sizeof odd);
    Py_ssize_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int k = 0; k < LANES; k++)
            odd[k] += values[i + k] - values[i + k];
    for (; i < n; i++)
        odd[0] += values[i] - values[i];
    memcpy(lanes, odd, sizeof odd);
}

/* Values, the table in which they are counted (can be NULL), and the results. */
typedef struct {
    Py_buffer values, table;
    int shift, counts, finite;
    float low, high;
} Job;

static void work(Job *job)
{
    float low[LANES], high[LANES], odd[LANES] = {0};
    const Py_ssize_t n = job->values.len / 4;
    for (int k = 0; k < LANES; k++) {
        low[k] = (float)Py_HUGE_VAL;
        high[k] = (float)-Py_HUGE_VAL;
    }
    for (Py_ssize_t start = 0; start < n; start += CHUNK) {
        const float *part = (const float *)job->values.buf + start;
        const Py_ssize_t size = n - start < CHUNK ? n - start : CHUNK;
        widen(low, high, part, size);
        if (job->counts)
            count(job->table.buf, part, size, job->shift);
        else
            spoil(odd, part, size);
    }
    for (int k = 1; k < LANES; k++) {
        low[0] = low[k] < low[0] ? low[k] : low[0];
        high[0] = high[k] > high[0] ? high[k] : high[0];
        odd[0] += odd[k];
    }
    job->low = low[0];
    job->high = high[0];
    job->finite = job->counts ? all_finite(job->table.buf, job->shift) : odd[0] == 0;
}

/* Parse (values, shift, table) or (values, 0, None) from Python. */
static int take(Job *job, PyObject *given)
{
    PyObject *table;
    if (!PyTuple_Check(given)) {
        PyErr_SetString(PyExc_TypeError, "fill: (values, shift, table) is wanted");
        return 0;
    }
    if (!PyArg_ParseTuple(given, "y*iO:fill", &job->values, &job->shift, &table))
        return 0;
    job->counts = table != Py_None;
    if (job->counts && PyObject_GetBuffer(table, &job->table, PyBUF_WRITABLE) < 0) {
        PyBuffer_Release(&job->values);
        return 0;
    }
    if (job->counts && (job->shift < 1 || job->shift > 22
                        || job->table.len != (((Py_ssize_t)1 << (32 - job->shift)) + SPARE) * 8)) {
        PyErr_SetString(PyExc_ValueError, "fill: the table is not one for this shift");
    } else if (job->values.len % 4 || (uintptr_t)job->values.buf % 4) {
        PyErr_SetString(PyExc_ValueError, "fill: the values are not aligned float32");
    } else {
        return 1;
    }
    PyBuffer_Release(&job->values);
    if (job->counts)
        PyBuffer_Release(&job->table);
    return 0;
}

static PyObject *told(const Job *job)
{
    return Py_BuildValue("ddN", (double)job->low, (double)job->high, PyBool_FromLong(job->finite));
}

static void give_back(Job *job)
{
    PyBuffer_Release(&job->values);
    if (job->counts)
        PyBuffer_Release(&job->table);
}

static PyObject *fill(PyObject *module, PyObject *arguments)
{
    Job job;
    (void)module;
    if (!take(&job, arguments))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    work(&job);
    Py_END_ALLOW_THREADS
    PyObject *result = told(&job);
    give_back(&job);
    return result;
}

static PyObject *fill_all(PyObject *module, PyObject *list)
{
    (void)module;
    if (!PyList_Check(list)) {
        PyErr_SetString(PyExc_TypeError, "fill_all: a list is wanted");
        return NULL;
    }
    const Py_ssize_t all = PyList_Size(list);
    Py_ssize_t taken = 0;
    PyObject *result = PyList_New(all);
    Job *jobs = PyMem_Calloc((size_t)all + 1, sizeof *jobs);
    if (jobs == NULL || result == NULL)
        PyErr_NoMemory();
    else
        while (taken < all && take(&jobs[taken], PyList_GetItem(list, taken)))
            taken++;
    if (!PyErr_Occurred()) {
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t i = 0; i < taken; i++)
            work(&jobs[i]);
        Py_END_ALLOW_THREADS
    }
    for (Py_ssize_t i = 0; i < taken; i++) {
        PyObject *one = PyErr_Occurred() ? NULL : told(&jobs[i]);
        if (one != NULL)
            PyList_SetItem(result, i, one);
        give_back(&jobs[i]);
    }
    PyMem_Free(jobs);
    if (PyErr_Occurred()) {
        Py_XDECREF(result);
        return NULL;
    }
    return result;
}

/* The rows of a table of pieces, each of `columns` entries. Cumulative rows contain the sums before each piece; their last
 * column contains the totals.
 */
typedef struct {
    Py_ssize_t columns;
    const double *center, *half, *weight, *density; /* density: weight / width, 0 for a narrow piece */
    const double *count, *sum, *square, *spread;    /* spread: weight * width^2 / 12 */
} Pieces;

enum { ROWS = 8, TOGETHER = 4 };

static const double ROUNDS = 6755399441055744.0; /* 1.5 * 2**52: adding it rounds a number to an integer */
static const double NARROW = 256.0; /* up to 256 steps from zero, pieces are at most two steps wide */

/* Return the first piece whose left end is at least `x`. */
static Py_ssize_t from_left(const Pieces *p, double x)
{
    Py_ssize_t low = 0, high = p->columns - 1;
    while (low < high) {
        const Py_ssize_t middle = low + (high - low) / 2;
        if (p->center[middle] - p->half[middle] < x)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Return the first piece whose right end is above `x`. */
static Py_ssize_t beyond(const Pieces *p, double x)
{
    Py_ssize_t low = 0, high = p->columns - 1;
    while (low < high) {
        const Py_ssize_t middle = low + (high - low) / 2;
        if (p->center[middle] + p->half[middle] <= x)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static double limited(double x, double low, double high)
{
    return x < low ? low : x > high ? high : x;
}

/* Return the integral from 0 to `x` of the squared distance from the nearest integer in `low` to `high`. */
static double area(double x, double low, double high)
{
    const double whole = limited(x, low, high) + ROUNDS - ROUNDS, away = x - whole;
    return whole / 12 + away * away * away / 3;
}

/* Return the squared error of any piece, in squared steps. */
static double of_any(const Pieces *p, Py_ssize_t i, double inverse, double low, double high)
{
    const double center = p->center[i] * inverse, half = p->half[i] * inverse;
    if (half < 1e-6) { /* the difference of areas would be dominated by rounding errors */
        const double away = center - (limited(center, low, high) + ROUNDS - ROUNDS);
        return p->weight[i] * (away * away + half * half / 3);
    }
    return p->weight[i] * (area(center + half, low, high) - area(center - half, low, high)) / (2 * half);
}

/* Return the squared error of pieces `first` to `last` within the range that are at most two steps wide, without their
 * spread: the squared distance of the center from the nearest integer, minus the gain where a piece reaches e beyond the
 * midpoint of two integers: the integral of (1/2 + t)^2 - (1/2 - t)^2 = 2t from 0 to e.
 */
static double of_narrow(const Pieces *p, Py_ssize_t first, Py_ssize_t last, double inverse)
{
    double away[TOGETHER] = {0}, gained[TOGETHER] = {0};
    const double *center = p->center, *half = p->half, *weight = p->weight, *density = p->density;
    Py_ssize_t i = first;
    for (; i + TOGETHER <= last; i += TOGETHER)
        for (int k = 0; k < TOGETHER; k++) {
            const double x = center[i + k] * inverse, wide = half[i + k] * inverse - 0.5;
            const double d = x - (x + ROUNDS - ROUNDS);
            const double above = wide + d > 0 ? wide + d : 0, below = wide - d > 0 ? wide - d : 0;
            away[k] += weight[i + k] * (d * d);
            gained[k] += density[i + k] * (above * above + below * below);
        }
    for (; i < last; i++) {
        const double x = center[i] * inverse, wide = half[i] * inverse - 0.5;
        const double d = x - (x + ROUNDS - ROUNDS);
        const double above = wide + d > 0 ? wide + d : 0, below = wide - d > 0 ? wide - d : 0;
        away[0] += weight[i] * (d * d);
        gained[0] += density[i] * (above * above + below * below);
    }
    return away[0] + away[1] + away[2] + away[3] - (gained[0] + gained[1] + gained[2] + gained[3]) / inverse;
}

/* Return the squared error of pieces `first` to `last` if all their values become `x`. */
static double at_one(const Pieces *p, Py_ssize_t first, Py_ssize_t last, double x)
{
    if (first >= last)
        return 0;
    return p->square[last] - p->square[first] - 2 * x * (p->sum[last] - p->sum[first])
        + x * x * (p->count[last] - p->count[first]);
}

/* Return the squared error of all pieces for the range from `low` to `high` steps of size `scale`. */
static double squared_error(const Pieces *p, double scale, double low, double high)
{
    const double inverse = 1 / scale;
    const Py_ssize_t all = p->columns - 1, first = from_left(p, low * scale), last = beyond(p, high * scale);
    const Py_ssize_t start = first;
    Py_ssize_t end = last, zero = from_left(p, -scale / 2), after = beyond(p, scale / 2);
    double error = 0, steps = 0;
    if (first > 0) { /* the previous piece may reach into the range */
        steps += of_any(p, first - 1, inverse, low, high);
        error += at_one(p, 0, first - 1, low * scale);
    }
    if (last < all) {
        if (last >= first)
            steps += of_any(p, last, inverse, low, high);
        error += at_one(p, last + 1, all, high * scale);
    }
    end = end < start ? start : end; /* one piece can reach beyond both limits */
    zero = zero < start ? start : zero > end ? end : zero;
    after = after < zero ? zero : after > end ? end : after;
    if (-low > NARROW || high > NARROW) {
        for (Py_ssize_t i = start; i < zero; i++)
            steps += of_any(p, i, inverse, low, high);
        for (Py_ssize_t i = after; i < end; i++)
            steps += of_any(p, i, inverse, low, high);
    } else if (start < end) {
        steps += of_narrow(p, start, zero, inverse) + of_narrow(p, after, end, inverse);
        error += p->spread[zero] - p->spread[start] + p->spread[end] - p->spread[after];
    }
    error += at_one(p, zero, after, 0); /* these become zero */
    return error + steps * scale * scale;
}

static PyObject *squared_errors(PyObject *module, PyObject *arguments)
{
    Py_buffer pieces, candidates, errors;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "y*y*w*:squared_errors", &pieces, &candidates, &errors))
        return NULL;
    PyObject *result = NULL;
    const Py_ssize_t many = errors.len / 8, columns = pieces.len / 8 / ROWS;
    if (errors.len % 8 || candidates.len != many * 3 * 8 || columns < 1 || pieces.len != columns * ROWS * 8) {
        PyErr_SetString(PyExc_ValueError, "squared_errors: the arrays do not fit each other");
    } else {
        const double *row = pieces.buf, *one = candidates.buf;
        const Pieces p = {columns,           row,               row + columns,     row + 2 * columns, row + 3 * columns,
                          row + 4 * columns, row + 5 * columns, row + 6 * columns, row + 7 * columns};
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t i = 0; i < many; i++, one += 3)
            ((double *)errors.buf)[i] = squared_error(&p, one[0], one[1], one[2]);
        Py_END_ALLOW_THREADS
        Py_INCREF(Py_None);
        result = Py_None;
    }
    PyBuffer_Release(&pieces);
    PyBuffer_Release(&candidates);
    PyBuffer_Release(&errors);
    return result;
}

/* Compute the sums of the squares of values and of differences, for each chunk in lanes of float32, which are short enough
 * to lose only the last bits. Squares beyond float32 make a sum infinite, NaN or zero.
 */
static void power_and_error(const float *expected, const float *found, Py_ssize_t n, double *sums)
{
    sums[0] = sums[1] = 0;
    for (Py_ssize_t start = 0; start < n; start += CHUNK) {
        const Py_ssize_t end = n - start < CHUNK ? n : start + CHUNK;
        float power[LANES] = {0}, error[LANES] = {0};
        Py_ssize_t i = start;
        for (; i + LANES <= end; i += LANES)
            for (int k = 0; k < LANES; k++) {
                const float value = expected[i + k], off = found[i + k] - value;
                power[k] += value * value;
                error[k] += off * off;
            }
        for (; i < end; i++) {
            const float value = expected[i], off = found[i] - value;
            power[0] += value * value;
            error[0] += off * off;
        }
        for (int k = 0; k < LANES; k++) {
            sums[0] += power[k];
            sums[1] += error[k];
        }
    }
}

static PyObject *squares(PyObject *module, PyObject *arguments)
{
    Py_buffer expected, found;
    double sums[2];
    (void)module;
    if (!PyArg_ParseTuple(arguments, "y*y*:squares", &expected, &found))
        return NULL;
    const int fits = expected.len == found.len && expected.len % 4 == 0
        && (uintptr_t)expected.buf % 4 == 0 && (uintptr_t)found.buf % 4 == 0;
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        power_and_error(expected.buf, found.buf, expected.len / 4, sums);
        Py_END_ALLOW_THREADS
    } else {
        PyErr_SetString(PyExc_ValueError, "squares: as many aligned float32 are wanted on both sides");
    }
    PyBuffer_Release(&expected);
    PyBuffer_Release(&found);
    return fits ? Py_BuildValue("dd", sums[0], sums[1]) : NULL;
}

/* A weight, float32 (outer, length, inner), whose blocks of `size` elements along the middle axis are searched. */
typedef struct {
    const float *values, *factors, *neighbors; /* neighbors: (neighbor_count, 2), a factor and a step of the zero point */
    Py_ssize_t length, inner, size, factor_count, neighbor_count;
    float qmin, qmax, mean, middle, smallest; /* the squared mean of the inputs, symmetric zero point, smallest scale */
    int symmetric, power_of_two;
} Search;

enum {
    TILE = 128, /* blocks that are searched at once */
    GROUP = 32  /* blocks whose sums stay in registers */
};

/* A tile of blocks, and the best params of each. */
typedef struct {
    float *columns; /* (size, TILE) */
    float low[TILE], high[TILE], sums[TILE], scale[TILE], zero[TILE], gain[TILE], best_scale[TILE], best_zero[TILE];
    float unit[TILE];
} Tile;

static const float FLOAT_ROUNDS = 12582912.0F; /* 1.5 * 2**23: adding it rounds a number to an integer */

static INLINE float clip(float value, float low, float high)
{
    value = value > low ? value : low;
    return value < high ? value : high;
}

/* The power of two of a positive float32, which is at most the number; the next one above it if `rounds_up`. */
static INLINE float power_of_two(float number, int rounds_up)
{
    uint32_t bits, power;
    memcpy(&bits, &number, sizeof bits);
    power = bits & 0x7F800000;
    if (!power) /* denormal: its highest bit */
        for (power = bits; power & (power - 1);)
            power &= power - 1;
    if (rounds_up && power != bits)
        power += 0x00800000;
    memcpy(&number, &power, sizeof number);
    return number;
}

/* Keep the params of the group's blocks whose gain is the largest so far. Each operation is that of
 * _search_chunk in block_search.py, in the same order, so that the results have the same bits.
 */
static INLINE void try_group(const Search *s, Tile *t, Py_ssize_t start)
{
    float code_sums[GROUP] = {0}, products[GROUP] = {0}, powers[GROUP] = {0}, low[GROUP], high[GROUP], inverse[GROUP];
    for (int k = 0; k < GROUP; k++) {
        low[k] = s->qmin - t->zero[start + k];
        high[k] = s->qmax - t->zero[start + k];
        inverse[k] = 1 / t->scale[start + k];
    }
    for (Py_ssize_t i = 0; i < s->size; i++) {
        const float *values = t->columns + i * TILE + start;
        for (int k = 0; k < GROUP; k++) {
            /* the limits are integers, so that rounding may follow */
            const float code = clip(values[k] * inverse[k], low[k], high[k]) + FLOAT_ROUNDS - FLOAT_ROUNDS;
            code_sums[k] += code;
            products[k] += code * values[k];
            powers[k] += code * code;
        }
    }
    for (int k = 0; k < GROUP; k++) {
        const Py_ssize_t at = start + k;
        const float share = s->mean * code_sums[k], product = products[k] + share * t->sums[at];
        const float power = powers[k] + share * code_sums[k], divisor = power > 1 ? power : 1;
        const float best = !s->power_of_two && product > 0 ? product / divisor : t->scale[at];
        const float gain = best * (2 * product - best * power);
        const int is_better = gain > t->gain[at];
        t->gain[at] = is_better ? gain : t->gain[at];
        t->best_scale[at] = is_better ? best : t->best_scale[at];
        t->best_zero[at] = is_better ? t->zero[at] : t->best_zero[at];
    }
}

static INLINE void try_tile(const Search *s, Tile *t)
{
    for (int k = 0; k < TILE; k++) {
        t->scale[k] = t->scale[k] > s->smallest ? t->scale[k] : s->smallest;
        if (s->power_of_two)
            t->scale[k] = power_of_two(t->scale[k], 1);
    }
    for (Py_ssize_t start = 0; start < TILE; start += GROUP)
        try_group(s, t, start);
}

/* Copy `count` blocks from the one at `first` on to the columns, divide them by powers of two, and find their limits. */
static INLINE void read_tile(const Search *s, Tile *t, Py_ssize_t first, Py_ssize_t count)
{
    const Py_ssize_t blocks = (s->length + s->size - 1) / s->size;
    Py_ssize_t place[TILE], valid[TILE], shortest = s->size;
    for (Py_ssize_t k = 0; k < TILE; k++) {
        const Py_ssize_t index = first + (k < count ? k : 0), row = index / s->inner, block = row % blocks * s->size;
        place[k] = (row / blocks * s->length + block) * s->inner + index % s->inner;
        valid[k] = s->length - block < s->size ? s->length - block : s->size;
        shortest = valid[k] < shortest ? valid[k] : shortest;
    }
    const int is_row = count == TILE && place[TILE - 1] - place[0] == TILE - 1; /* consecutive elements of the weight */
    float largest[TILE] = {0};
    for (Py_ssize_t i = 0; i < s->size; i++) {
        float *column = t->columns + i * TILE;
        if (is_row && i < shortest)
            memcpy(column, s->values + place[0] + i * s->inner, TILE * sizeof *column);
        else
            for (int k = 0; k < TILE; k++)
                column[k] = i < valid[k] ? s->values[place[k] + i * s->inner] : 0;
        for (int k = 0; k < TILE; k++) {
            const float size = column[k] < 0 ? -column[k] : column[k];
            largest[k] = size > largest[k] ? size : largest[k];
        }
    }
    for (int k = 0; k < TILE; k++) {
        t->unit[k] = largest[k] > 0 ? power_of_two(largest[k], 0) : 0;
        largest[k] = largest[k] > 0 ? t->unit[k] : 1;
        t->low[k] = t->high[k] = t->sums[k] = 0;
        t->gain[k] = -1;
        t->best_scale[k] = 1;
        t->best_zero[k] = 0;
    }
    for (Py_ssize_t i = 0; i < s->size; i++)
        for (int k = 0; k < TILE; k++) {
            const float value = t->columns[i * TILE + k] / largest[k];
            t->columns[i * TILE + k] = value;
            t->sums[k] += value;
            t->low[k] = value < t->low[k] ? value : t->low[k];
            t->high[k] = value > t->high[k] ? value : t->high[k];
        }
}

static INLINE void search_tile(const Search *s, Tile *t)
{
    const float above = s->qmax - s->middle, below = s->qmin - s->middle, steps = s->qmax - s->qmin;
    for (Py_ssize_t i = 0; i < s->factor_count; i++) {
        const float factor = s->factors[i];
        for (int k = 0; k < TILE; k++) {
            const float high = t->high[k] / above, low = t->low[k] / below;
            if (s->symmetric) {
                t->scale[k] = (high > low ? high : low) * factor;
                t->zero[k] = s->middle;
            } else {
                const float scale = (t->high[k] - t->low[k]) / steps * factor;
                t->scale[k] = scale > s->smallest ? scale : s->smallest;
                t->zero[k] = clip(s->qmin - t->low[k] * factor / t->scale[k], s->qmin, s->qmax) + FLOAT_ROUNDS - FLOAT_ROUNDS;
            }
        }
        try_tile(s, t);
    }
    for (Py_ssize_t i = 0; i < s->neighbor_count; i++) {
        const float factor = s->neighbors[2 * i], step = s->neighbors[2 * i + 1];
        if (s->symmetric && step != 0)
            continue;
        for (int k = 0; k < TILE; k++) {
            t->scale[k] = t->best_scale[k] * factor;
            t->zero[k] = clip(t->best_zero[k] + step, s->qmin, s->qmax);
        }
        try_tile(s, t);
    }
}

/* Write the scale, zero point and power of two of all blocks, each (count,). */
static INLINE void search_all(const Search *s, Tile *t, Py_ssize_t count, float *results)
{
    for (Py_ssize_t start = 0; start < count; start += TILE) {
        const Py_ssize_t n = count - start < TILE ? count - start : TILE;
        read_tile(s, t, start, n);
        search_tile(s, t);
        memcpy(results + start, t->best_scale, n * sizeof *results);
        memcpy(results + count + start, t->best_zero, n * sizeof *results);
        memcpy(results + 2 * count + start, t->unit, n * sizeof *results);
    }
}

#ifdef HAS_AVX2
__attribute__((target("avx2"))) static void search_all_avx2(const Search *s, Tile *t, Py_ssize_t count, float *results)
{
    search_all(s, t, count, results);
}

__attribute__((target("avx512f"))) static void search_all_avx512(
    const Search *s, Tile *t, Py_ssize_t count, float *results)
{
    search_all(s, t, count, results);
}
#endif

static PyObject *search_blocks(PyObject *module, PyObject *arguments)
{
    Py_buffer values, results, factors, neighbors; /* float32, of which only the results are written, (3, count) */
    Search s;
    Tile tile;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "y*w*y*y*(nnn)(fffff)pp:search_blocks", &values, &results, &factors, &neighbors,
                          &s.length, &s.inner, &s.size, &s.qmin, &s.qmax, &s.mean, &s.middle, &s.smallest, &s.symmetric,
                          &s.power_of_two))
        return NULL;
    const Py_ssize_t count = results.len / 12;
    const int fits = s.length > 0 && s.inner > 0 && s.size > 0 && s.size <= s.length && results.len == count * 12
        && values.len % (4 * s.length * s.inner) == 0 && factors.len % 4 == 0 && neighbors.len % 8 == 0
        && count == values.len / 4 / s.length * ((s.length + s.size - 1) / s.size);
    tile.columns = fits ? PyMem_Malloc(s.size * TILE * sizeof *tile.columns) : NULL;
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "search_blocks: the arrays do not fit each other");
    } else if (!tile.columns) {
        PyErr_NoMemory();
    } else {
        s.values = values.buf;
        s.factors = factors.buf;
        s.factor_count = factors.len / 4;
        s.neighbors = neighbors.buf;
        s.neighbor_count = neighbors.len / 8;
        Py_BEGIN_ALLOW_THREADS
#ifdef HAS_AVX2
        if (__builtin_cpu_supports("avx512f"))
            search_all_avx512(&s, &tile, count, results.buf);
        else if (__builtin_cpu_supports("avx2"))
            search_all_avx2(&s, &tile, count, results.buf);
        else
#endif
            search_all(&s, &tile, count, results.buf);
        Py_END_ALLOW_THREADS
    }
    const int succeeded = tile.columns != NULL;
    PyMem_Free(tile.columns);
    PyBuffer_Release(&values);
    PyBuffer_Release(&results);
    PyBuffer_Release(&factors);
    PyBuffer_Release(&neighbors);
    if (!succeeded)
        return NULL;
    Py_INCREF(Py_None);
    return Py_None;
}

static PyMethodDef methods[] = {
    {"fill", fill, METH_VARARGS, "fill(values, shift, table): see count_values_numpy in histogram_kernel."},
    {"fill_all", fill_all, METH_O, "fill_all([(values, shift, table), ...]): the results of `fill` for each."},
    {"squared_errors", squared_errors, METH_VARARGS,
     "squared_errors(pieces, candidates, errors): see graphquant.observers.distribution."},
    {"squares", squares, METH_VARARGS, "squares(expected, actual): see sum_squares_numpy in histogram_kernel."},
    {"search_blocks", search_blocks, METH_VARARGS,
     "search_blocks(values, results, factors, neighbors, sizes, numbers, symmetric, power_of_two): see block_search."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_fill",
    .m_methods = methods,
};

#ifdef SIGBUS
/* ONNX Runtime maps external weights to memory. If such a file is truncated meanwhile, reading it raises SIGBUS, and no
 * Python code runs any more. The process then ends with a message and the exit code of an unreadable model, and the next
 * run removes its temporary files, as those of every process that was killed.
 */
static void end_after_truncation(int number, siginfo_t *fault, void *context)
{
    static const char message[] = "error: A file became shorter while it was read, such as the external data of the model."
                                  " Copy it again, and change no file during a run.\n";
    static atomic_flag reported = ATOMIC_FLAG_INIT;
    (void)context;
    if (fault->si_code == BUS_ADRERR) {
        while (atomic_flag_test_and_set(&reported))
            pause(); /* another thread, which read the same file, reports and ends the process */
        if (write(2, message, sizeof message - 1) < 0)
            _exit(3);
        _exit(3);
    }
    signal(number, SIG_DFL); /* another fault, which the same instruction raises again */
}

static void handle_truncation(void)
{
    struct sigaction action;
    if (sigaction(SIGBUS, NULL, &action) || (action.sa_flags & SA_SIGINFO) || action.sa_handler != SIG_DFL)
        return; /* another handler, such as that of faulthandler, stays */
    memset(&action, 0, sizeof action);
    action.sa_sigaction = end_after_truncation;
    action.sa_flags = SA_SIGINFO;
    sigemptyset(&action.sa_mask);
    sigaction(SIGBUS, &action, NULL);
}
#endif

PyMODINIT_FUNC PyInit__fill(void)
{
#ifdef SIGBUS
    handle_truncation();
#endif
    return PyModuleDef_Init(&module);
}
