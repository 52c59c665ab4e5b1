/* Parser of PyTorch's mangled kernel names. Not a general demangler: it handles the templates of the interpreted kernels
 * and rejects all others. The tables list the differences between kernels and between versions of PyTorch. */
#include <string.h>

#include "simulator/kernels/kernel.h"

/* A position in a name. `named` is the last c10 number type. A substitution in place of a type can only refer to it,
 * because a kernel with two such types spells the second one in full. */
typedef struct cursor {
    const char *at;
    sim_type_t named;
} cursor_t;

typedef struct word {
    const char *text;
    size_t length;
} word_t;

static const struct {
    const char *word;
    sim_shape_t shape;
} kernels[] = {
    {"vectorized_elementwise_kernel", SIM_SHAPE_DENSE},
    {"unrolled_elementwise_kernel", SIM_SHAPE_UNROLLED},
    {"gpu_kernel_impl_nocast", SIM_SHAPE_STRIDED}, /* in elementwise_kernel */
    {"gpu_kernel_impl", SIM_SHAPE_STRIDED_CAST},   /* the same */
    {"ReduceOp", SIM_SHAPE_REDUCTION},             /* in reduce_kernel */
    {"elementwise_kernel_with_index", SIM_SHAPE_INDEX},
    {"distribution_elementwise_grid_stride_kernel", SIM_SHAPE_RANDOM},
};

/* How a functor's name specifies the types. */
typedef enum form {
    FORM_ONE,    /* <T> */
    FORM_THREE,  /* <T, T, result, inner functor> */
    FORM_LAMBDA, /* type of the lambda's parameter */
    FORM_RESULT, /* the same; the function's name determines the result */
    FORM_PAIR,   /* <T, result>, of a function with such a lambda */
} form_t;

static const struct {
    const char *word;
    form_t form;
    sim_operation_t operation;
    sim_constant_t constant;
    unsigned inputs;
    sim_type_t result; /* FORM_RESULT */
} functors[] = {
    {"FillFunctor", FORM_ONE, SIM_FILL, SIM_CONSTANT_FIRST, 0, SIM_TYPE_NONE},
    {"CUDAFunctor_add", FORM_ONE, SIM_ADD, SIM_CONSTANT_NONE, 2, SIM_TYPE_NONE},
    {"CUDAFunctorOnSelf_add", FORM_ONE, SIM_ADD, SIM_CONSTANT_SECOND, 1, SIM_TYPE_NONE},
    {"CUDAFunctorOnOther_add", FORM_ONE, SIM_ADD, SIM_CONSTANT_FIRST, 1, SIM_TYPE_NONE},
    {"AbsFunctor", FORM_ONE, SIM_ABSOLUTE, SIM_CONSTANT_NONE, 1, SIM_TYPE_NONE},
    {"BinaryFunctor", FORM_THREE, SIM_COPY, SIM_CONSTANT_NONE, 2, SIM_TYPE_NONE},
    {"AUnaryFunctor", FORM_THREE, SIM_COPY, SIM_CONSTANT_FIRST, 1, SIM_TYPE_NONE},
    {"BUnaryFunctor", FORM_THREE, SIM_COPY, SIM_CONSTANT_SECOND, 1, SIM_TYPE_NONE},
    {"direct_copy_kernel_cuda", FORM_LAMBDA, SIM_COPY, SIM_CONSTANT_NONE, 1, SIM_TYPE_NONE},
    {"converting_copy_kernel_cuda", FORM_PAIR, SIM_COPY, SIM_CONSTANT_NONE, 1, SIM_TYPE_NONE},
    {"float16_copy_kernel_cuda", FORM_RESULT, SIM_COPY, SIM_CONSTANT_NONE, 1, SIM_TYPE_HALF},
    {"bfloat16_copy_kernel_cuda", FORM_RESULT, SIM_COPY, SIM_CONSTANT_NONE, 1, SIM_TYPE_BFLOAT16},
    {"float16tofloat32_copy_kernel_cuda", FORM_RESULT, SIM_COPY, SIM_CONSTANT_NONE, 1, SIM_TYPE_FLOAT},
    {"bfloat16tofloat32_copy_kernel_cuda", FORM_RESULT, SIM_COPY, SIM_CONSTANT_NONE, 1, SIM_TYPE_FLOAT},
};

/* Operations of the functors of FORM_THREE. */
static const struct {
    const char *word;
    sim_operation_t operation;
} inner_functors[] = {
    {"MulFunctor", SIM_MULTIPLY},   {"DivFunctor", SIM_DIVIDE},   {"CompareEqFunctor", SIM_COMPARE},
    {"BitwiseAndFunctor", SIM_AND}, {"BitwiseOrFunctor", SIM_OR},
};

static const struct {
    const char *word;
    sim_operation_t operation;
} reductions[] = {
    {"sum_functor", SIM_ADD},       {"and_kernel_cuda", SIM_AND},   {"or_kernel_cuda", SIM_OR},
    {"MaxNanFunctor", SIM_MAXIMUM}, {"MinNanFunctor", SIM_MINIMUM},
};

static const struct {
    const char *word;
    sim_operation_t operation;
} distributions[] = {
    {"normal_and_transform", SIM_NORMAL},
    {"uniform_and_transform", SIM_UNIFORM},
    {"random_kernel", SIM_RANDOM},
    {"random_from_to_kernel", SIM_RANDOM_FROM},
};

/* The types of a dispatch over all types, in order. The mangled lambdas have the same numbers: E, E0_, E1_, ... */
static const sim_type_t dispatched[] = {SIM_TYPE_UINT8,  SIM_TYPE_INT8,  SIM_TYPE_INT32, SIM_TYPE_INT64,   SIM_TYPE_INT16,
                                        SIM_TYPE_DOUBLE, SIM_TYPE_FLOAT, SIM_TYPE_HALF,  SIM_TYPE_BFLOAT16};

static const char sleep_kernel[] = "11spin_kernel"; /* torch.cuda._sleep */

#define COUNT_OF(array) (sizeof(array) / sizeof *(array))

static bool is_word(const word_t *word, const char *text) {
    return word->length == strlen(text) && memcmp(word->text, text, word->length) == 0;
}

static bool skip(cursor_t *cursor, const char *text) {
    size_t length = strlen(text);
    if (strncmp(cursor->at, text, length) != 0) return false;
    cursor->at += length;
    return true;
}

static bool is_digit(char c) { return c >= '0' && c <= '9'; }

static bool skip_substitution(cursor_t *cursor) {
    const char *at = cursor->at;
    if (*at++ != 'S') return false;
    if (*at == 't') {
        cursor->at = at + 1;
        return true;
    }
    while (is_digit(*at) || (*at >= 'A' && *at <= 'Z')) at++;
    if (*at != '_') return false;
    cursor->at = at + 1;
    return true;
}

static bool read_word(cursor_t *cursor, word_t *word) {
    const char *at = cursor->at;
    size_t length = 0;
    while (is_digit(*at) && length < SIZE_MAX / 16) length = 10 * length + (size_t)(*at++ - '0');
    if (at == cursor->at || length == 0 || length > strlen(at)) return false;
    *word = (word_t){at, length};
    cursor->at = at + length;
    return true;
}

/* The last component of a possibly qualified name, after the markers of local names: ZZZNS0_3fooE gives foo. */
static bool read_name(cursor_t *cursor, word_t *name) {
    bool found = false;
    while (*cursor->at == 'Z') cursor->at++;
    skip(cursor, "N");
    while (skip_substitution(cursor)) continue;
    while (is_digit(*cursor->at)) {
        if (!read_word(cursor, name)) return false;
        found = true;
    }
    return found;
}

static sim_type_t read_type(cursor_t *cursor) {
    static const struct {
        char code;
        sim_type_t type;
    } codes[] = {{'h', SIM_TYPE_UINT8}, {'a', SIM_TYPE_INT8},  {'s', SIM_TYPE_INT16},  {'i', SIM_TYPE_INT32},
                 {'l', SIM_TYPE_INT64}, {'f', SIM_TYPE_FLOAT}, {'d', SIM_TYPE_DOUBLE}, {'b', SIM_TYPE_BOOL}};
    for (size_t i = 0; i < COUNT_OF(codes); i++) {
        if (*cursor->at != codes[i].code) continue;
        cursor->at++;
        return codes[i].type;
    }
    if (skip(cursor, "N3c108BFloat16E")) return cursor->named = SIM_TYPE_BFLOAT16;
    if (skip(cursor, "N3c104HalfE")) return cursor->named = SIM_TYPE_HALF;
    return skip_substitution(cursor) ? cursor->named : SIM_TYPE_NONE;
}

/* Skips integer template arguments: Li512ELi1E. */
static void skip_integers(cursor_t *cursor) {
    while (skip(cursor, "Li")) {
        while (is_digit(*cursor->at)) cursor->at++;
        skip(cursor, "E");
    }
}

/* Advances to the parameters of the relevant lambda: the first one with parameters. */
static bool find_lambda(cursor_t *cursor) {
    for (const char *at = strstr(cursor->at, "EUl"); at; at = strstr(at + 1, "EUl")) {
        if (at[3] == 'v') continue;
        cursor->at = at + 3;
        return true;
    }
    return false;
}

/* The computing type: the small floating-point types are computed in float. */
static sim_type_t computing_type(sim_type_t type) {
    return type == SIM_TYPE_HALF || type == SIM_TYPE_BFLOAT16 ? SIM_TYPE_FLOAT : type;
}

static bool parse_three(cursor_t *cursor, sim_kernel_name_t *name) {
    word_t inner;
    if (!skip(cursor, "I")) return false;
    name->input = read_type(cursor);
    sim_type_t second = read_type(cursor);
    name->output = read_type(cursor);
    if (second != name->input || !read_name(cursor, &inner) || !skip(cursor, "I")) return false;
    name->compute = read_type(cursor);
    for (size_t i = 0; i < COUNT_OF(inner_functors); i++) {
        if (!is_word(&inner, inner_functors[i].word)) continue;
        name->operation = inner_functors[i].operation;
        return true;
    }
    return false;
}

static bool parse_functor(cursor_t *cursor, const word_t *word, sim_kernel_name_t *name) {
    size_t i = 0;
    while (i < COUNT_OF(functors) && !is_word(word, functors[i].word)) i++;
    if (i == COUNT_OF(functors)) return false;
    name->operation = functors[i].operation;
    name->constant = functors[i].constant;
    name->inputs = functors[i].inputs;
    if (functors[i].form == FORM_THREE) return parse_three(cursor, name);
    bool listed = functors[i].form == FORM_ONE || functors[i].form == FORM_PAIR;
    if (listed ? !skip(cursor, "I") : !find_lambda(cursor)) return false;
    name->input = name->output = read_type(cursor);
    name->compute = name->operation == SIM_FILL || name->operation == SIM_COPY ? name->input : computing_type(name->input);
    if (functors[i].form == FORM_PAIR) name->output = read_type(cursor);
    if (functors[i].form == FORM_RESULT) name->output = functors[i].result;
    return true;
}

/* ReduceOp<input, func_wrapper_t<output, functor or lambda>, index, output, ...>, or MeanOps<input, computing, factor,
 * output> instead of the wrapper. */
static bool parse_reduction(cursor_t *cursor, sim_kernel_name_t *name) {
    word_t wrapper, function;
    name->inputs = 1;
    name->input = read_type(cursor);
    if (!read_name(cursor, &wrapper) || !skip(cursor, "I")) return false;
    if (is_word(&wrapper, "MeanOps")) {
        name->operation = SIM_MEAN;
        sim_type_t input = read_type(cursor), factor = SIM_TYPE_NONE;
        name->compute = read_type(cursor);
        factor = read_type(cursor);
        name->output = read_type(cursor);
        return input == name->input && factor == name->compute;
    }
    if (!is_word(&wrapper, "func_wrapper_t")) return false;
    name->output = read_type(cursor);
    if (!read_name(cursor, &function)) return false;
    size_t i = 0;
    while (i < COUNT_OF(reductions) && !is_word(&function, reductions[i].word)) i++;
    if (i == COUNT_OF(reductions)) return false;
    name->operation = reductions[i].operation;
    bool lambda = name->operation != SIM_MAXIMUM && name->operation != SIM_MINIMUM;
    if (lambda ? !find_lambda(cursor) : !skip(cursor, "I")) return false;
    name->compute = read_type(cursor);
    return true;
}

/* arange: only the number of the innermost lambda determines the type. */
static bool parse_range(cursor_t *cursor, const word_t *word, sim_kernel_name_t *name) {
    size_t index = 0;
    if (!is_word(word, "arange_cuda_out")) return false;
    const char *last = NULL;
    for (const char *at = strstr(cursor->at, "ENKUlvE"); at; at = strstr(at + 1, "ENKUlvE")) last = at + strlen("ENKUlvE");
    if (!last) return false;
    if (is_digit(*last)) index = (size_t)(*last++ - '0') + 1;
    if (strncmp(last, "_clEvEUllE", strlen("_clEvEUllE")) != 0 || index >= COUNT_OF(dispatched)) return false;
    name->operation = SIM_RANGE;
    name->input = name->output = dispatched[index];
    /* On the device, ranges accumulate in float for floating-point types and in int64_t for integers. */
    name->compute = sim_type_is_real(name->output) ? computing_type(name->output) : SIM_TYPE_INT64;
    return true;
}

/* The function with the lambda determines the distribution. The first argument of distribution_nullary_kernel is the
 * output type, and that of the kernel the computing type. */
static bool parse_random(cursor_t *cursor, sim_type_t compute, sim_kernel_name_t *name) {
    static const char writer[] = "27distribution_nullary_kernelI";
    word_t word;
    size_t i = 0;
    if (!read_name(cursor, &word)) return false;
    while (i < COUNT_OF(distributions) && !is_word(&word, distributions[i].word)) i++;
    const char *at = strstr(cursor->at, writer);
    if (i == COUNT_OF(distributions) || !at) return false;
    /* The small types were spelled in full earlier in the name. */
    if (strstr(cursor->at, "N3c108BFloat16E"))
        cursor->named = SIM_TYPE_BFLOAT16;
    else if (strstr(cursor->at, "N3c104HalfE"))
        cursor->named = SIM_TYPE_HALF;
    cursor->at = at + strlen(writer);
    name->operation = distributions[i].operation;
    name->input = name->output = read_type(cursor);
    bool integer = name->operation == SIM_RANDOM || name->operation == SIM_RANDOM_FROM;
    name->compute = integer ? SIM_TYPE_INT64 : compute;
    /* The writer's first lambda uses one stride; its second one uses an offset calculator. */
    const char *end = strstr(cursor->at, "EUli");
    return end && strncmp(end + 5, "E_E", 3) == 0;
}

static bool find_shape(const word_t *word, sim_shape_t *shape) {
    for (size_t i = 0; i < COUNT_OF(kernels); i++) {
        if (!is_word(word, kernels[i].word)) continue;
        *shape = kernels[i].shape;
        return true;
    }
    return false;
}

bool sim_kernel_parse(const char *mangled, sim_kernel_name_t *result) {
    cursor_t cursor = {.at = mangled, .named = SIM_TYPE_NONE};
    sim_kernel_name_t name = {.input = SIM_TYPE_NONE, .compute = SIM_TYPE_NONE, .output = SIM_TYPE_NONE};
    word_t word;
    bool parsed = false;
    if (!skip(&cursor, "_Z") || !read_name(&cursor, &word) || !skip(&cursor, "I")) return false;
    bool nested = is_word(&word, "elementwise_kernel") || is_word(&word, "reduce_kernel");
    sim_type_t first = SIM_TYPE_NONE; /* computing type of a distribution */
    if (is_word(&word, "distribution_elementwise_grid_stride_kernel") && !skip(&cursor, "j") && !skip(&cursor, "m"))
        first = read_type(&cursor);
    skip_integers(&cursor);
    if (nested && (!read_name(&cursor, &word) || !skip(&cursor, "I"))) return false;
    if (!find_shape(&word, &name.shape)) return false;
    if (name.shape == SIM_SHAPE_REDUCTION)
        parsed = parse_reduction(&cursor, &name);
    else if (name.shape == SIM_SHAPE_INDEX)
        parsed = skip(&cursor, "i") && read_name(&cursor, &word) && parse_range(&cursor, &word, &name);
    else if (name.shape == SIM_SHAPE_RANDOM)
        parsed = parse_random(&cursor, first, &name);
    else
        parsed = read_name(&cursor, &word) && parse_functor(&cursor, &word, &name);
    if (!parsed || !sim_type_bytes(name.input) || !sim_type_bytes(name.compute) || !sim_type_bytes(name.output))
        return false;
    name.casts = name.shape == SIM_SHAPE_STRIDED_CAST || strstr(cursor.at, "12LoadWithCastI") != NULL;
    *result = name;
    return true;
}

bool sim_kernel_sleeps(const char *mangled) { return strstr(mangled, sleep_kernel) != NULL; }
