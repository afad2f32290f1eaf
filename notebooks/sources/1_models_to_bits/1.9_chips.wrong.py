# %% exercise="1.9.1" hint="the ridge is in FLOPs a byte"
def smallest_batch(
    inputs: int, outputs: int, itemsize: int, peak: float, bandwidth: float
) -> int:
    return math.ceil(peak / bandwidth)


# %% exercise="1.9.1" hint="the tokens' own numbers are moved too"
def smallest_batch(
    inputs: int, outputs: int, itemsize: int, peak: float, bandwidth: float
) -> int:
    return math.ceil(peak / bandwidth * itemsize / 2)


# %% exercise="1.9.1" hint="a multiply-add is two FLOPs"
def smallest_batch(
    inputs: int, outputs: int, itemsize: int, peak: float, bandwidth: float
) -> int:
    gain = inputs * outputs / peak - itemsize * (inputs + outputs) / bandwidth
    return 0 if gain <= 0 else math.ceil(itemsize * inputs * outputs / bandwidth / gain)


# %% exercise="1.9.1" hint="no batch is large enough"
def smallest_batch(
    inputs: int, outputs: int, itemsize: int, peak: float, bandwidth: float
) -> int:
    gain = 2 * inputs * outputs / peak - itemsize * (inputs + outputs) / bandwidth
    return math.ceil(itemsize * inputs * outputs / bandwidth / gain)


# %% exercise="1.9.1" hint="one token too few"
def smallest_batch(
    inputs: int, outputs: int, itemsize: int, peak: float, bandwidth: float
) -> int:
    gain = 2 * inputs * outputs / peak - itemsize * (inputs + outputs) / bandwidth
    return 0 if gain <= 0 else int(itemsize * inputs * outputs / bandwidth / gain)


# %% exercise="1.9.2" hint="a sparse rate counts products"
def read_sheet(sheet: dict) -> dict[str, float]:
    flops = sheet["tflops"] * 1e12 * (sheet["cores"] if sheet["per"] == "core" else 1)
    link = sheet["link"] * (1e9 if sheet["link_unit"] == "GB/s" else 1e9 / 8)
    link /= 2 if sheet["both_ways"] else 1
    memory = sheet["memory"] * (2**30 if sheet["memory_unit"] == "GiB" else 1e9)
    return {"flops": flops, "memory": memory, "link": link}


# %% exercise="1.9.2" hint="that of one core; how many"
def read_sheet(sheet: dict) -> dict[str, float]:
    flops = sheet["tflops"] * 1e12 / (2 if sheet["sparse"] else 1)
    link = sheet["link"] * (1e9 if sheet["link_unit"] == "GB/s" else 1e9 / 8)
    link /= 2 if sheet["both_ways"] else 1
    memory = sheet["memory"] * (2**30 if sheet["memory_unit"] == "GiB" else 1e9)
    return {"flops": flops, "memory": memory, "link": link}


# %% exercise="1.9.2" hint="one direction"
def read_sheet(sheet: dict) -> dict[str, float]:
    flops = sheet["tflops"] * 1e12 / (2 if sheet["sparse"] else 1)
    flops *= sheet["cores"] if sheet["per"] == "core" else 1
    link = sheet["link"] * (1e9 if sheet["link_unit"] == "GB/s" else 1e9 / 8)
    memory = sheet["memory"] * (2**30 if sheet["memory_unit"] == "GiB" else 1e9)
    return {"flops": flops, "memory": memory, "link": link}


# %% exercise="1.9.2" hint="a GiB has 2^30 bytes"
def read_sheet(sheet: dict) -> dict[str, float]:
    flops = sheet["tflops"] * 1e12 / (2 if sheet["sparse"] else 1)
    flops *= sheet["cores"] if sheet["per"] == "core" else 1
    link = sheet["link"] * (1e9 if sheet["link_unit"] == "GB/s" else 1e9 / 8)
    link /= 2 if sheet["both_ways"] else 1
    return {"flops": flops, "memory": sheet["memory"] * 1e9, "link": link}


# %% exercise="1.9.2" hint="eight bits"
def read_sheet(sheet: dict) -> dict[str, float]:
    flops = sheet["tflops"] * 1e12 / (2 if sheet["sparse"] else 1)
    flops *= sheet["cores"] if sheet["per"] == "core" else 1
    link = sheet["link"] * 1e9 / (2 if sheet["both_ways"] else 1)
    memory = sheet["memory"] * (2**30 if sheet["memory_unit"] == "GiB" else 1e9)
    return {"flops": flops, "memory": memory, "link": link}


# %% exercise="1.9.3" hint="those that it calls"
def own_times(events: list[tuple[str, float, float]]) -> dict[str, float]:
    own = Counter()
    for name, _, duration in events:
        own[name] += duration
    return dict(own)


# %% exercise="1.9.3" hint="directly inside"
def own_times(events: list[tuple[str, float, float]]) -> dict[str, float]:
    own = Counter()
    for name, start, duration in events:
        own[name] += duration
        for _, begin, length in events:
            if begin >= start and begin + length <= start + duration and length < duration:
                own[name] -= length
    return dict(own)


# %% exercise="1.9.3" hint="any order"
def own_times(events: list[tuple[str, float, float]]) -> dict[str, float]:
    own, inside = Counter(), []
    for name, start, duration in events:
        while inside and start >= inside[-1][1]:
            inside.pop()
        if inside:
            own[inside[-1][0]] -= duration
        own[name] += duration
        inside.append((name, start + duration))
    return dict(own)


# %% exercise="1.9.3" hint="begins where another ends"
def own_times(events: list[tuple[str, float, float]]) -> dict[str, float]:
    own, inside = Counter(), []
    for name, start, duration in sorted(events, key=lambda event: (event[1], -event[2])):
        while inside and start > inside[-1][1]:
            inside.pop()
        if inside:
            own[inside[-1][0]] -= duration
        own[name] += duration
        inside.append((name, start + duration))
    return dict(own)
