"""Images of the Pathfinder task, drawn: two long dashed snakes, short ones to distract, and two discs at ends of snakes.

The law is that of the published generator (Linsley et al., 2018; its two-snake form, with the parameters of the Long Range
Arena); the code is new. A snake is a chain of paddles, short strokes. Paddles keep a margin from all that is already there,
except from the paddle before them. A next paddle starts one margin beyond the last one and points to one of the pixels on a
circle, with weight cos^2 of the turn times how free that pixel is. Long snakes that get stuck are drawn anew from their start; a
short snake that gets stuck is left out.

Three things were taken from images of that generator rather than from its description, and are measured in
``tests/lra/test_lra_data.py``: the contrasts; a first paddle that only needs 2 x 2 free pixels; and that first paddles, save that of the
second long snake, point more or less to the upper left, so that most short snakes, whose direction is drawn once, are left out.

Strokes are drawn once, as stamps of 9 x 9 pixels; what remains are lookups, compiled with numba. Random words are splitmix64 of (seed, image).
"""

import functools
import math
from typing import NamedTuple

import numba
import numpy as np
from PIL import Image, ImageDraw

SIZE, PADDING = 32, 1
LENGTH, THICKNESS, MARGIN = 2, 0.5, 1  # of a paddle
SCALE = 2  # how much finer strokes are drawn before they are shrunk
SEED_DISTANCE, RADIUS = 7, 1.5
LONG_INK, SHORT_INK = 1.5, 2.0  # contrast of the long and of the short snakes; discs have 1
PADDLE_TRIES = 3
UP_LEFT, SPREAD = 225, 70  # degrees; y points down
REACH = LENGTH + math.ceil(THICKNESS) + MARGIN  # stamps are squares of 2 REACH + 1 pixels
STEP = LENGTH + MARGIN  # from the pivot of a paddle to its head; the pivot is one margin behind its tail
FREE, CLASH, LEAST_FREE = 0.3, 1.8, 0.01


class Stamps(NamedTuple):
    """Paddles in all directions, drawn in the center of a square: first those of a step, S of them, then those of a first paddle, 360."""

    step: np.ndarray  # [S, 2], offsets (y, x) of the pixels on the circle around a pivot
    angle: np.ndarray  # [S + 360]
    ink: np.ndarray  # [S + 360, 9, 9]; of a step from its pixel back towards the pivot, of a first paddle from its tail
    area: np.ndarray  # [S + 360, 9, 9], what the paddle occupies
    pivot: np.ndarray  # [S + 360, 2], offset from a pivot to the next one
    head: np.ndarray  # [360, 2], offset from the tail of a first paddle
    first: np.ndarray  # [360, 2], offset from that tail to the pivot
    disc: np.ndarray  # [9, 9]


def _shifted(angle: float, distance: float) -> tuple[int, int]:
    """Offset (y, x) of the pixel at a distance; the published generator rounds up."""
    return math.ceil(round(distance * math.sin(angle), 9)), math.ceil(round(distance * math.cos(angle), 9))


def _shrink(fine: Image.Image) -> np.ndarray:
    side = 2 * REACH + 1
    return np.asarray(fine.resize((side, side), Image.Resampling.LANCZOS), dtype=np.float64) / 255


def _paddle(angle: float) -> tuple[np.ndarray, np.ndarray]:
    """Draws one stroke from the center of a square; returns its ink and the area around it, both within [0, 1]."""
    center, side = REACH * SCALE, 2 * REACH * SCALE + 1
    fine = Image.new("L", (side, side))
    dy, dx = _shifted(angle, LENGTH * SCALE)
    ImageDraw.Draw(fine).line([(center, center), (center + dx, center + dy)], fill=255, width=round(THICKNESS * SCALE))
    stroke = np.asarray(fine) > 0
    grown = np.zeros_like(stroke)
    wide = MARGIN * SCALE
    for y in range(-wide, wide + 1):
        for x in range(-wide, wide + 1):
            if y * y + x * x <= wide * wide:
                grown |= np.roll(stroke, (y, x), (0, 1))  # too far from the border to come back on the other side
    return _shrink(fine), _shrink(Image.fromarray(grown.astype(np.uint8) * 255))


@functools.cache
def stamps() -> Stamps:
    """Draws all stamps, in some 50 ms."""
    degrees = [math.radians(degree) for degree in range(360)]
    circle = [2 * math.pi * number / (2 * math.pi * STEP) for number in range(math.ceil(2 * math.pi * STEP))]
    steps = sorted({(math.floor(STEP * math.sin(angle)), math.floor(STEP * math.cos(angle))) for angle in circle})
    angles = [math.atan2(y, x) for y, x in steps]
    ink, area = zip(*[_paddle(angle) for angle in (*(angle + math.pi for angle in angles), *degrees)], strict=True)
    heads = np.array([_shifted(angle, LENGTH) for angle in degrees])
    y, x = np.mgrid[: SCALE * (2 * REACH + 1), : SCALE * (2 * REACH + 1)] - REACH * SCALE
    disc = Image.fromarray((y * y + x * x <= (RADIUS * SCALE) ** 2).astype(np.uint8) * 255)
    return Stamps(
        step=np.array(steps),
        angle=np.array([*angles, *(degree * math.pi / 180 for degree in range(360))]),
        ink=np.stack(ink),
        area=np.stack(area),
        pivot=np.array([_shifted(angle, LENGTH + 2 * MARGIN) for angle in (*angles, *degrees)]),
        head=heads,
        first=heads + np.array([_shifted(angle + math.pi, STEP) for angle in degrees]),
        disc=_shrink(disc),
    )


@numba.njit(cache=True)
def _word(state):  # splitmix64
    state[0] += np.uint64(0x9E3779B97F4A7C15)
    z = state[0]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@numba.njit(cache=True)
def _uniform(state):
    return np.float64(_word(state) >> np.uint64(11)) / 9007199254740992.0


@numba.njit(cache=True)
def _below(state, bound):
    return int(_uniform(state) * bound)


@numba.njit(cache=True)
def _put(canvas, stamp, y, x, contrast=1.0):
    """Lays a stamp over the canvas, the larger value winning."""
    for i in range(max(0, y - REACH), min(SIZE, y + REACH + 1)):
        for j in range(max(0, x - REACH), min(SIZE, x + REACH + 1)):
            canvas[i, j] = max(canvas[i, j], contrast * stamp[i - y + REACH, j - x + REACH])


@numba.njit(cache=True)
def _clashes(occupied, stamp, y, x):
    for i in range(max(0, y - REACH), min(SIZE, y + REACH + 1)):
        for j in range(max(0, x - REACH), min(SIZE, x + REACH + 1)):
            if occupied[i, j] + stamp[i - y + REACH, j - x + REACH] >= CLASH:
                return True
    return False


@numba.njit(cache=True)
def _inside(y, x):
    return 0 <= y < SIZE and 0 <= x < SIZE


@numba.njit(cache=True)
def _room(occupied, rim, state):
    """Draws a tail at which a first paddle has room, a block of 2 x 2 beyond ``rim`` pixels from the border; (-1, -1) if no pixel has room."""
    num_places, chosen_y, chosen_x = 0, -1, -1
    for y in range(rim, SIZE - rim - 1):
        for x in range(rim, SIZE - rim - 1):
            if max(occupied[y, x], occupied[y, x + 1], occupied[y + 1, x], occupied[y + 1, x + 1]) <= FREE:
                num_places += 1
                if _below(state, num_places) == 0:
                    chosen_y, chosen_x = y, x
    return chosen_y, chosen_x


@numba.njit(cache=True)
def _direction(state):
    """Draws the direction of a first paddle in degrees; -1 if the published images have none in that direction."""
    degree = _below(state, 360)
    return degree if abs(degree - UP_LEFT) <= SPREAD else -1


@numba.njit(cache=True)
def _extend(ink, occupied, snake, contrast, stamps, state):
    """Adds a paddle to a snake (direction, pivot y, pivot x, head y, head x); False if there is no room for it."""
    pivot_y = snake[1] + stamps.pivot[snake[0], 0]
    pivot_x = snake[2] + stamps.pivot[snake[0], 1]
    angle, count = stamps.angle[snake[0]], len(stamps.step)
    weights = np.zeros(count)
    for step in range(count):
        y, x = pivot_y + stamps.step[step, 0], pivot_x + stamps.step[step, 1]
        turn = math.cos(stamps.angle[step] - angle)
        if _inside(y, x) and turn > 0:
            taken = occupied[y, x]
            for a, b in ((y - 1, x), (y + 1, x), (y, x - 1), (y, x + 1)):
                if _inside(a, b):
                    taken = max(taken, occupied[a, b])
            weights[step] = turn * turn * (1 - taken)
    total = weights.sum()
    if total < 1e-4:
        return False
    for _ in range(PADDLE_TRIES):
        left = _uniform(state) * total
        step = 0
        while step < count - 1 and left >= weights[step]:
            left -= weights[step]
            step += 1
        y, x = pivot_y + stamps.step[step, 0], pivot_x + stamps.step[step, 1]
        if weights[step] > 0 and not _clashes(occupied, stamps.area[step], y, x):
            _put(ink, stamps.ink[step], y, x, contrast)
            _put(occupied, stamps.area[snake[0]], snake[3], snake[4])  # only now is the paddle before in the way
            snake[0], snake[1], snake[2], snake[3], snake[4] = step, pivot_y, pivot_x, y, x
            return True
    return False


@numba.njit(cache=True)
def _seed(ink, snake, degree, y, x, contrast, stamps):
    """Starts a snake at a tail; False if its head or pivot would be outside."""
    head_y, head_x = y + stamps.head[degree, 0], x + stamps.head[degree, 1]
    pivot_y, pivot_x = y + stamps.first[degree, 0], x + stamps.first[degree, 1]
    if not (_inside(y, x) and _inside(head_y, head_x) and _inside(pivot_y, pivot_x)):
        return False
    snake[0], snake[1], snake[2] = len(stamps.step) + degree, pivot_y, pivot_x
    snake[3], snake[4] = y, x  # the stamp of a first paddle lies at its tail, that of the others at their heads
    _put(ink, stamps.ink[snake[0]], y, x, contrast)
    return True


@numba.njit(cache=True)
def _targets(contour, ink, occupied, snakes, tips, stamps, state):
    """Draws both long snakes; False if they got stuck."""
    ink[:] = 0
    occupied[:] = 0
    occupied[:PADDING], occupied[-PADDING:], occupied[:, :PADDING], occupied[:, -PADDING:] = 1, 1, 1, 1
    degree = _direction(state)
    y, x = _room(occupied, 2 * SEED_DISTANCE, state)
    if degree < 0 or not _seed(ink, snakes[0], degree, y, x, LONG_INK, stamps):
        return False
    tips[0, 0], tips[0, 1] = y, x
    placed = False
    for _ in range(PADDLE_TRIES):
        degree, towards = _below(state, 360), _below(state, 360) * math.pi / 180
        a = int(np.round(y + SEED_DISTANCE * math.sin(towards)))
        b = int(np.round(x + SEED_DISTANCE * math.cos(towards)))
        if _seed(ink, snakes[1], degree, a, b, LONG_INK, stamps):
            tips[1, 0], tips[1, 1] = a, b
            placed = True
            break
    if not placed:
        return False
    for _ in range(contour - 1):
        for snake in range(2):
            if not _extend(ink, occupied, snakes[snake], LONG_INK, stamps, state):
                return False
    # The last paddle of the second snake alone: the published generator forgets that of the first.
    _put(occupied, stamps.area[snakes[1, 0]], snakes[1, 3], snakes[1, 4])
    return True


@numba.njit(cache=True)
def _distract(paddles, ink, occupied, stamps, state):
    """Draws a short snake where there is room; nothing, if it gets stuck."""
    if (occupied <= FREE).sum() < LEAST_FREE * SIZE * SIZE:
        return
    degree = _direction(state)
    y, x = _room(occupied, PADDING, state)
    if degree < 0 or y < 0:
        return
    new_ink, new_occupied, snake = ink.copy(), occupied.copy(), np.zeros(5, dtype=np.int64)
    if not _seed(new_ink, snake, degree, y, x, SHORT_INK, stamps):
        return
    for _ in range(paddles - 1):
        if not _extend(new_ink, new_occupied, snake, SHORT_INK, stamps, state):
            return
    _put(new_occupied, stamps.area[snake[0]], snake[3], snake[4])
    ink[:], occupied[:] = new_ink, new_occupied


@numba.njit(cache=True)
def _draw(contour, paddles, distractors, connected, state, stamps):
    ink, occupied = np.zeros((SIZE, SIZE)), np.zeros((SIZE, SIZE))
    snakes, tips = np.zeros((2, 5), dtype=np.int64), np.zeros((2, 2), dtype=np.int64)
    while not _targets(contour, ink, occupied, snakes, tips, stamps, state):
        pass
    for _ in range(distractors):
        _distract(paddles, ink, occupied, stamps, state)
    first = _below(state, 2)
    last = first if connected else 1 - first
    _put(ink, stamps.disc, tips[first, 0], tips[first, 1])
    _put(ink, stamps.disc, snakes[last, 3], snakes[last, 4])
    return ink


def draw(contour: int, *, seed: int, number: int) -> tuple[np.ndarray, int]:
    """Draws the image of a number: [32, 32] uint8, white on black, and its label, 1 if both discs are at the ends of one snake.

    ``contour`` is the number of paddles of the long snakes, at least 6; the short ones have a third of it, and together 20 at most. Of the
    images 2 n and 2 n + 1, one has label 1, so any even number of them is balanced.
    """
    draws = np.array([seed, 2 * (number // 2) + 1], dtype=np.uint64)
    state = np.array([seed, 2 * number], dtype=np.uint64)
    for words in (draws, state):  # both numbers go through the mixer, so that neighbors share nothing
        words[0] = _word(words) ^ words[1]
        words[0] = _word(words)
    label = int(_word(draws) >> np.uint64(63)) ^ (number & 1)
    paddles = contour // 3
    ink = _draw(contour, paddles, 20 // paddles, bool(label), state, stamps())
    return np.rint(ink * 255 / ink.max()).astype(np.uint8), label
