"""Walks over compressed rows on the CPU: distances, components, matchings, cycles, and who hears of whom.

In and out: numpy arrays; row ``i`` of a graph is ``index[ptr[i]:ptr[i + 1]]``. Not here: what the answers mean
(``hamiltonian``, ``universality``).
"""

import numpy as np

from ..ops.cpu.threads import numba_kernel


@numba_kernel
def breadth_first(ptr, index, roots, depth):
    """Writes the distance of every node from the nearest root to ``depth`` (-1 where there is no way).

    Returns how many were reached.
    """
    queue = np.empty(len(depth), np.int64)
    depth[:] = -1
    count = 0
    for root in roots:
        if depth[root] < 0:
            depth[root] = 0
            queue[count] = root
            count += 1
    head = 0
    while head < count and count < len(depth):  # all nodes reached: the other edges lead nowhere new
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
def compare_rows(ptr, index, back_ptr, back_index, row_block, column_block, own, returned, within):
    """Writes for each row how often it holds itself, holds others that hold it, and holds columns of its own block.

    Columns ascend. ``back_ptr`` and ``back_index`` are the same edges by column.
    """
    for row in range(len(ptr) - 1):
        back, back_end = back_ptr[row], back_ptr[row + 1]
        for edge in range(ptr[row], ptr[row + 1]):
            column = index[edge]
            while back < back_end and back_index[back] < column:
                back += 1
            if column == row:
                own[row] += 1
            elif back < back_end and back_index[back] == column:
                returned[row] += 1
            if row_block[row] == column_block[column]:
                within[row] += 1


@numba_kernel
def topological_order(ptr, index, labels, members, first, order):
    """Writes an order of components in which arcs only lead forward."""
    waiting = np.zeros(len(order), np.int64)  # arcs that enter a component
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
        for place in range(first[component], first[component + 1]):
            for edge in range(ptr[members[place]], ptr[members[place] + 1]):
                other = labels[index[edge]]
                if other != component:
                    waiting[other] -= 1
                    if waiting[other] == 0:
                        order[count] = other
                        count += 1


@numba_kernel
def parts_without(ptr, index, parts):
    """Writes into how many parts a connected undirected graph falls without each node (Hopcroft and Tarjan, 1973)."""
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
            parts[node] += 1  # what lies above it


@numba_kernel
def _has(ptr, index, row, column):
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
    """Writes a largest matching: the column of each row to ``mate``, the row of each column to ``follower``, or -1.

    Returns the number of phases, O(sqrt(n)) of O(E) each, for any graph (Hopcroft and Karp, 1973).
    """
    n = len(mate)
    mate[:] = -1
    follower[:] = -1
    depth, edge, path = np.empty(n, np.int64), np.empty(n, np.int64), np.empty(n, np.int64)
    phases = 0
    while True:
        phases += 1
        last = n  # depth at which a first free column is found; the search ends there
        head = count = 0
        for row in range(n):
            edge[row], depth[row] = ptr[row], -1
            if mate[row] < 0:
                depth[row], path[count] = 0, row
                count += 1
        while head < count and depth[path[head]] <= last:
            row = path[head]
            head += 1
            for place in range(ptr[row], ptr[row + 1]):
                other = follower[index[place]]
                if other < 0:
                    last = depth[row]
                elif depth[other] < 0:
                    depth[other], path[count] = depth[row] + 1, other
                    count += 1
        if last == n:
            return phases
        for root in range(n):  # shortest ways to free columns, no two of which share a row; each edge is tried once
            length = 0
            if mate[root] < 0:
                path[0], length = root, 1
            while length > 0:
                row = path[length - 1]
                if edge[row] == ptr[row + 1]:  # no way leads on from here
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
def _root(parent, node):
    while parent[node] != node:
        parent[node] = parent[parent[node]]
        node = parent[node]
    return node


@numba_kernel
def merge_cycles(ptr, index, follow):
    """Merges cycles of a cover by exchanging two arcs, in place, for as long as that is possible.

    Returns how many cycles are left.
    """
    nodes = len(follow)
    back = np.empty(nodes, np.int64)
    cycle = np.arange(nodes)
    for node in range(nodes):
        back[follow[node]] = node
        a, b = _root(cycle, node), _root(cycle, follow[node])
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
                a, b = _root(cycle, node), _root(cycle, other)
                if a != b and _has(ptr, index, back[other], follow[node]):
                    before, after = back[other], follow[node]
                    follow[node], back[other] = other, node
                    follow[before], back[after] = after, before
                    cycle[a] = b
                    left -= 1
                    merged = True
    return left


@numba_kernel
def _next(word):
    return word * 6364136223846793005 + 1442695040888963407  # modulo 2^64; the upper half is random enough


@numba_kernel
def rotate(ptr, index, in_ptr, inward, follow, word, moves):
    """Turns the longest cycle of a cover into one cycle through all nodes, by random rotations.

    It opens the cycle at a random arc, and rotates the end of that path until the path has absorbed all cycles and
    closes. A rotation goes from the end back to ``x`` inside the path, and from the token before ``x`` to a later
    ``y``. The piece from y to the end and the piece from x to before y change places, and what stood before y is the
    new end. Among the ends in reach, one with an arc to what is missing is taken at once. Returns True if ``follow`` is
    now one cycle; otherwise ``follow`` is as it was.
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
    word = _next(word)
    start = best
    for _ in range((word >> 33 & 0x7FFFFFFF) % size_of_best):
        start = follow[start]
    path, spare, place = np.empty(nodes, np.int64), np.empty(nodes, np.int64), np.full(nodes, -1)
    length = 0
    node = start
    while place[node] < 0:
        path[length], place[node] = node, length
        length += 1
        node = follow[node]
    # nodes with an arc to what is missing: a node outside, or in the end the start of the path
    goal = np.zeros(nodes, np.bool_)
    stale = True
    for _ in range(moves):
        if stale:
            goal[:] = False
            for node in range(nodes):
                if place[node] < 0 or (length == nodes and node == path[0]):
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
                if place[node] < 0:
                    while place[node] < 0:
                        path[length], place[node] = node, length
                        length += 1
                        node = follow[node]
                    break
            stale = True
            continue
        cut, turn, seen = -1, -1, 0
        degree = ptr[end + 1] - ptr[end]
        done = False
        word = _next(word)
        shift = word >> 33 & 0x7FFFFFFF
        for step in range(degree):
            x = place[index[ptr[end] + (step + shift) % degree]]
            if x == 0:  # the path is a cycle: it can end anywhere
                for spot in range(length - 1):
                    if goal[path[spot]] and length < nodes:
                        cut, turn, done = 0, spot + 1, True
                        break
            else:
                before = path[x - 1]
                for edge in range(ptr[before], ptr[before + 1]):
                    y = place[index[edge]]
                    if y > x:
                        seen += 1
                        word = _next(word)
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
            place[path[spot]] = spot
        stale = stale or cut == 0
    return False


@numba_kernel
def spread(first, last, ptr, index, old, new, stamp, next_stamp, since, now, full, target, keeps):
    """One step of what rows know: row i of ``new`` becomes the union of the rows of ``old`` that it attends to.

    Rows are sets of nodes, 64 to a word. Where ``keeps`` (all nodes attend to themselves in all patterns) sets only
    grow, so those that are full stay as they are, and only rows that changed after step ``since``, when this pattern
    was last applied, can bring news. ``stamp`` holds the last step at which each row changed.
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
