#include "simulator/work/nodes.h"

#include <stdlib.h>

bool sim_nodes_add(sim_nodes_t *nodes, const uint64_t *ids, size_t count) {
    if (!count) return true;
    uint64_t *grown = realloc(nodes->ids, (nodes->count + count) * sizeof *grown);
    if (!grown) return false;
    nodes->ids = grown;
    size_t known = nodes->count;
    for (size_t i = 0; i < count; i++) {
        bool is_new = true;
        for (size_t j = 0; j < known && is_new; j++) is_new = grown[j] != ids[i];
        if (is_new) grown[nodes->count++] = ids[i];
    }
    return true;
}

void sim_nodes_clear(sim_nodes_t *nodes) {
    free(nodes->ids);
    *nodes = (sim_nodes_t){0};
}
