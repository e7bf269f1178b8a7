"""Graph algorithms over compressed rows on the CPU: distances, components, matchings, cycles, information spread.

In and out: numpy arrays; row ``i`` of a graph is ``index[ptr[i]:ptr[i + 1]]``. Not here: the conclusions from them
(``hamiltonian``, ``conditions``).
"""

from typing import Any

import numpy as np

from ..ops.cpu.threads import numba_kernel

Array = np.ndarray[Any, Any]


@numba_kernel
def breadth_first(ptr, index, roots, depth):
    """Write each node's distance from the nearest root to ``depth``, or -1; return the number of reached nodes."""
    queue = np.empty(len(depth), np.int64)
    depth[:] = -1
    count = 0
    for root in roots:
        if depth[root] < 0:
            depth[root] = 0
            queue[count] = root
            count += 1
    head = 0
    while head < count and count < len(depth):  # stop once all nodes are reached
        node = queue[head]
        head += 1
        for edge in range(ptr[node], ptr[node + 1]):
            other = index[edge]
            if depth[other] < 0:
                depth[other] = depth[node] + 1
                queue[count] = other
                count += 1
    return count


@numba_kernel
def compare_rows(ptr, index, back_ptr, back_index, row_community, column_community, self_loops, returned, within):
    """Count self-loops, edges whose opposite is also an edge, and edges within a community, for each row.

    Columns ascend. ``back_ptr`` and ``back_index`` are the same edges by column.
    """
    for row in range(len(ptr) - 1):
        back, back_end = back_ptr[row], back_ptr[row + 1]
        for edge in range(ptr[row], ptr[row + 1]):
            column = index[edge]
            while back < back_end and back_index[back] < column:
                back += 1
            if column == row:
                self_loops[row] += 1
            elif back < back_end and back_index[back] == column:
                returned[row] += 1
            if row_community[row] == column_community[column]:
                within[row] += 1


@numba_kernel
def topological_order(ptr, index, labels, members, first, order):
    """Write a topological order of the strong components."""
    waiting = np.zeros(len(order), np.int64)  # arcs into a component from components without a position
    for node in range(len(labels)):
        for edge in range(ptr[node], ptr[node + 1]):
            if labels[index[edge]] != labels[node]:
                waiting[labels[index[edge]]] += 1
    count = 0
    for component in range(len(order)):
        if waiting[component] == 0:
            order[count] = component
            count += 1
    head = 0
    while head < count:
        component = order[head]
        head += 1
        for member in range(first[component], first[component + 1]):
            for edge in range(ptr[members[member]], ptr[members[member] + 1]):
                other = labels[index[edge]]
                if other != component:
                    waiting[other] -= 1
                    if waiting[other] == 0:
                        order[count] = other
                        count += 1


@numba_kernel
def parts_without(ptr, index, parts):
    """Write the number of components of a connected undirected graph without each node (Hopcroft and Tarjan, 1973)."""
    n = len(parts)
    number = np.zeros(n, np.int64)  # order of discovery, from 1
    low = np.zeros(n, np.int64)  # first discovered node that the subtree has an edge to
    parent = np.full(n, -1, np.int64)
    edge = ptr[:-1].copy()
    number[0] = low[0] = count = 1
    node = 0
    while node >= 0:
        if edge[node] < ptr[node + 1]:
            other = index[edge[node]]
            edge[node] += 1
            if number[other] == 0:
                count += 1
                number[other] = low[other] = count
                parent[other] = node
                node = other
            elif number[other] < low[node]:
                low[node] = number[other]
        else:
            up = parent[node]
            if up >= 0:
                if low[node] < low[up]:
                    low[up] = low[node]
                if low[node] >= number[up]:  # nothing in this subtree reaches above its parent
                    parts[up] += 1
            node = up
    for node in range(n):
        if parent[node] >= 0:
            parts[node] += 1  # the part that holds its parent


@numba_kernel
def _has_arc(ptr, index, row, column):
    """True if a row holds a column, by bisection."""
    low, high = ptr[row], ptr[row + 1]
    while low < high:
        middle = (low + high) // 2
        if index[middle] < column:
            low = middle + 1
        else:
            high = middle
    return low < ptr[row + 1] and index[low] == column


@numba_kernel
def match(ptr, index, mate, follower):
    """Write a maximum matching: the column of each row to ``mate``, the row of each column to ``follower``, or -1.

    Returns the number of phases, O(sqrt(n)) of O(E) each, for any graph (Hopcroft and Karp, 1973).
    """
    n = len(mate)
    mate[:] = -1
    follower[:] = -1
    depth, edge, path = np.empty(n, np.int64), np.empty(n, np.int64), np.empty(n, np.int64)
    phases = 0
    while True:
        phases += 1
        last = n  # depth of the first free column, where the search ends
        head = count = 0
        for row in range(n):
            edge[row], depth[row] = ptr[row], -1
            if mate[row] < 0:
                depth[row], path[count] = 0, row
                count += 1
        while head < count and depth[path[head]] <= last:
            row = path[head]
            head += 1
            for arc in range(ptr[row], ptr[row + 1]):
                other = follower[index[arc]]
                if other < 0:
                    last = depth[row]
                elif depth[other] < 0:
                    depth[other], path[count] = depth[row] + 1, other
                    count += 1
        if last == n:
            return phases
        for root in range(n):  # disjoint shortest paths to free columns; each edge is tried once
            length = 0
            if mate[root] < 0:
                path[0], length = root, 1
            while length > 0:
                row = path[length - 1]
                if edge[row] == ptr[row + 1]:  # a dead end
                    length -= 1
                    continue
                other = follower[index[edge[row]]]
                edge[row] += 1
                if other < 0:
                    for spot in range(length):
                        row = path[spot]
                        mate[row] = index[edge[row] - 1]
                        follower[mate[row]] = row
                    break
                if depth[other] == depth[row] + 1 and depth[other] <= last:
                    path[length] = other
                    length += 1


@numba_kernel
def _find_root(parent, node):
    """The root of a node in a union-find forest, with path halving."""
    while parent[node] != node:
        parent[node] = parent[parent[node]]
        node = parent[node]
    return node


@numba_kernel
def merge_cycles(ptr, index, follow):
    """Merge cycles of a cover in place by exchanging two arcs, as long as possible; return how many are left."""
    nodes = len(follow)
    back = np.empty(nodes, np.int64)
    cycle = np.arange(nodes)
    for node in range(nodes):
        back[follow[node]] = node
        a, b = _find_root(cycle, node), _find_root(cycle, follow[node])
        cycle[a] = b
    left = 0
    for node in range(nodes):
        left += cycle[node] == node
    merged = True
    while merged and left > 1:
        merged = False
        for node in range(nodes):
            for edge in range(ptr[node], ptr[node + 1]):
                other = index[edge]
                a, b = _find_root(cycle, node), _find_root(cycle, other)
                if a != b and _has_arc(ptr, index, back[other], follow[node]):
                    before, after = back[other], follow[node]
                    follow[node], back[other] = other, node
                    follow[before], back[after] = after, before
                    cycle[a] = b
                    left -= 1
                    merged = True
    return left


@numba_kernel
def _next_word(word):
    """Next state of a linear congruential generator."""
    return word * 6364136223846793005 + 1442695040888963407  # modulo 2^64; the upper half is random enough


@numba_kernel
def rotate(ptr, index, in_ptr, inward, follow, word, moves):
    """Turn the longest cycle of a cover into one cycle through all nodes, by random rotations.

    The function opens the cycle at a random arc, and rotates the end of that path until the path contains all nodes and
    closes. A rotation uses an arc from the end to ``x`` inside the path, and an arc from the node before ``x`` to a
    later ``y``: the piece from y to the end and the piece from x to before y change places, and the node before y is
    the new end. A new end with an arc to a missing node is chosen at once. Returns True if ``follow`` is now one cycle;
    otherwise ``follow`` does not change.
    """
    nodes = len(follow)
    label = np.full(nodes, -1)
    best, size_of_best = 0, 0
    for node in range(nodes):
        if label[node] < 0:
            other, size = node, 0
            while label[other] < 0:
                label[other] = node
                size += 1
                other = follow[other]
            if size > size_of_best:
                best, size_of_best = node, size
    word = _next_word(word)
    start = best
    for _ in range((word >> 33 & 0x7FFFFFFF) % size_of_best):
        start = follow[start]
    path, spare, position = np.empty(nodes, np.int64), np.empty(nodes, np.int64), np.full(nodes, -1)
    length = 0
    node = start
    while position[node] < 0:
        path[length], position[node] = node, length
        length += 1
        node = follow[node]
    # nodes with an arc to a missing node: one outside the path, or the start of a path through all nodes
    goal = np.zeros(nodes, np.bool_)
    stale = True
    for _ in range(moves):
        if stale:
            goal[:] = False
            for node in range(nodes):
                if position[node] < 0 or (length == nodes and node == path[0]):
                    for edge in range(in_ptr[node], in_ptr[node + 1]):
                        goal[inward[edge]] = True
            stale = False
        end = path[length - 1]
        if goal[end]:
            if length == nodes:
                for spot in range(nodes):
                    follow[path[spot]] = path[(spot + 1) % nodes]
                return True
            for edge in range(ptr[end], ptr[end + 1]):
                node = index[edge]
                if position[node] < 0:
                    while position[node] < 0:
                        path[length], position[node] = node, length
                        length += 1
                        node = follow[node]
                    break
            stale = True
            continue
        cut, turn, seen = -1, -1, 0
        degree = ptr[end + 1] - ptr[end]
        done = False
        word = _next_word(word)
        shift = word >> 33 & 0x7FFFFFFF
        for step in range(degree):
            x = position[index[ptr[end] + (step + shift) % degree]]
            if x == 0:  # the path closes to a cycle, so it can end at any node
                for spot in range(length - 1):
                    if goal[path[spot]] and length < nodes:
                        cut, turn, done = 0, spot + 1, True
                        break
            else:
                before = path[x - 1]
                for edge in range(ptr[before], ptr[before + 1]):
                    y = position[index[edge]]
                    if y > x:
                        seen += 1
                        word = _next_word(word)
                        if goal[path[y - 1]]:
                            cut, turn, done = x, y, True
                            break
                        if (word >> 33 & 0x7FFFFFFF) % seen == 0:
                            cut, turn = x, y
            if done or seen > 1000:
                break
        if cut < 0:
            return False
        tail = length - turn
        spare[:tail] = path[turn:length]
        spare[tail : length - cut] = path[cut:turn]
        for spot in range(cut, length):
            path[spot] = spare[spot - cut]
            position[path[spot]] = spot
        stale = stale or cut == 0
    return False


@numba_kernel
def spread_step(first, last, ptr, index, old, new, stamp, next_stamp, since, now, full, target, keeps):
    """One step of the spread of information: row i of ``new`` is the union of the rows of ``old`` that i attends to.

    Rows are sets of nodes, 64 to a word. If ``keeps`` (all nodes attend to themselves in all patterns), sets only grow:
    full sets stay, and only rows that changed after step ``since``, when this pattern was last applied, are read.
    ``stamp`` holds the last step at which each row changed.
    """
    for row in range(first, last):
        for word in range(old.shape[1]):
            new[row, word] = 0
            if keeps:  # a conditional expression of a uint64 and 0 would be a float64 to numba
                new[row, word] = old[row, word]
        next_stamp[row] = stamp[row]
        if keeps and full[row]:
            continue
        for edge in range(ptr[row], ptr[row + 1]):
            other = index[edge]
            if not keeps or stamp[other] > since:
                for word in range(old.shape[1]):
                    new[row, word] |= old[other, word]
        full[row] = True
        changed = False
        for word in range(old.shape[1]):
            if new[row, word] != old[row, word]:
                changed = True
            if new[row, word] != target[word]:
                full[row] = False
        if changed:
            next_stamp[row] = now
