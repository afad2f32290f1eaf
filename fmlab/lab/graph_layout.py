"""Where the boxes of a drawn graph stand: layers by depth, few crossings, nothing on top of anything else.

The method is Sugiyama's (Sugiyama, Tagawa and Toda 1981): each box one layer below the deepest that it reads;
an edge over several layers gets a place in each of them; each layer is sorted by the mean place of its
neighbours, downwards and upwards in turn; then places are moved towards that mean as far as there is room.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

GAP, LANE, BETWEEN = 18.0, 12.0, 30.0  # pixels: between boxes, of an edge's lane, between layers
SWEEPS = 8


@dataclass
class Box:
    """What is drawn as one box. inputs: names of boxes; given: whether it is an input of the graph itself;
    width, height: in pixels; x, y: its middle, its upper edge."""

    name: str
    lines: tuple[str, ...]
    kind: str
    about: str
    inputs: tuple[str, ...]
    width: float
    height: float
    given: bool = False
    x: float = 0.0
    y: float = 0.0


@dataclass
class _Place:
    """A box, or the lane of an edge through a layer."""

    width: float
    box: Box | None = None
    x: float = 0.0
    above: list["_Place"] = field(default_factory=list)
    below: list["_Place"] = field(default_factory=list)


Route = list[tuple[float, float]]


def arrange(boxes: Sequence[Box]) -> tuple[list[Route], float, float]:
    """Give each box its place, from (0, 0); the points of each edge, in pixels, and the size of it all.

    boxes: each behind those that it reads.
    """
    layers, edges = _layers(boxes)
    for sweep in range(SWEEPS):
        ordered = layers if sweep % 2 == 0 else layers[::-1]
        for layer in ordered:
            layer.sort(key=lambda place: _mean(place.above if sweep % 2 == 0 else place.below, place.x))
            _spread(layer, [place.x for place in layer])
    for sweep in range(SWEEPS):
        for layer in layers if sweep % 2 == 0 else layers[::-1]:
            _spread(layer, [_mean(place.above + place.below, place.x) for place in layer])
    left = min(place.x - place.width / 2 for layer in layers for place in layer)
    width = max(place.x + place.width / 2 for layer in layers for place in layer) - left
    tops, y = [], 0.0
    for layer in layers:
        tops.append(y)
        tallest = max((place.box.height for place in layer if place.box), default=0.0)
        for place in layer:
            place.x -= left
            if place.box:
                place.box.x, place.box.y = place.x, y
        y += tallest + BETWEEN
    return [_route(edge, tops) for edge in edges], width, y - BETWEEN


def _layers(boxes: Sequence[Box]) -> tuple[list[list[_Place]], list[list[tuple[int, _Place]]]]:
    """The layers, and each edge as its (layer, place), from the box that is read to the one that reads."""
    depth = _depths(boxes)
    layers: list[list[_Place]] = [[] for _ in range(max(depth.values()) + 1)]
    places = {box.name: _Place(box.width + GAP, box) for box in boxes}
    for box in boxes:
        layers[depth[box.name]].append(places[box.name])
    edges = []
    for box in boxes:
        for given in dict.fromkeys(box.inputs):
            way = [(depth[given], places[given])]
            for level in range(depth[given] + 1, depth[box.name]):
                lane = _Place(LANE)
                layers[level].append(lane)
                way.append((level, lane))
            way.append((depth[box.name], places[box.name]))
            for (_, upper), (_, lower) in pairwise(way):
                upper.below.append(lower)
                lower.above.append(upper)
            edges.append(way)
    for layer in layers:
        _spread(layer, [0.0] * len(layer))
    return layers, edges


def _depths(boxes: Sequence[Box]) -> dict[str, int]:
    """A box is one layer below the deepest that it reads; what depends on no drawn input, such as a mask or a
    transposed weight, and the inputs themselves stand as low as their readers let them."""
    depth: dict[str, int] = {}
    readers: dict[str, list[str]] = defaultdict(list)
    constant: set[str] = set()
    for box in boxes:
        depth[box.name] = max((depth[given] + 1 for given in box.inputs), default=0)
        for given in box.inputs:
            readers[given].append(box.name)
        if not box.given and all(given in constant for given in box.inputs):
            constant.add(box.name)
    for box in reversed(boxes):
        if readers[box.name] and (box.given or box.name in constant):
            depth[box.name] = min(depth[reader] for reader in readers[box.name]) - 1
    return depth


def _mean(places: Sequence[_Place], otherwise: float) -> float:
    return sum(place.x for place in places) / len(places) if places else otherwise


def _spread(layer: Sequence[_Place], wanted: Sequence[float]) -> None:
    """Put the places of a layer as near to `wanted` as their order and widths allow."""
    x = -float("inf")
    previous = 0.0
    for place, want in zip(layer, wanted, strict=True):
        x = max(want, x + (previous + place.width) / 2)
        place.x, previous = x, place.width
    off = sum(want - place.x for place, want in zip(layer, wanted, strict=True)) / max(1, len(layer))
    for place in layer:
        place.x += off


def _route(edge: Sequence[tuple[int, _Place]], tops: Sequence[float]) -> Route:
    """From the lower edge of a box, through the lanes, to the upper edge of another."""
    points: Route = []
    for number, (level, place) in enumerate(edge):
        if number == 0:
            assert place.box is not None
            points += [(place.x, place.box.y + place.box.height), (place.x, tops[level + 1] - BETWEEN)]
        elif number == len(edge) - 1:
            points.append((place.x, tops[level]))
        else:
            points += [(place.x, tops[level]), (place.x, tops[level + 1] - BETWEEN)]
    return points
