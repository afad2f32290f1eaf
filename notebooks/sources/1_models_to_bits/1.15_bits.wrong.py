# %% exercise="1.15.1" hint="ties: exactly in the middle"
def find_bug(rounding) -> float:
    torch.manual_seed(0)
    x = torch.randn(100_000)
    x = x[(x.view(torch.int32) & 0xFFFF) != 0x8000]
    wrong = x[rounding(x) != x.bfloat16().float()]
    return wrong[0].item() if len(wrong) else math.nan


# %% exercise="1.15.1" hint="ties of negative numbers"
def find_bug(rounding) -> float:
    halves = torch.arange(2**15 - 2**7) << 16
    x = (
        torch.cat([halves, halves + 0x8000, halves + 0x9000])
        .to(torch.int32)
        .view(torch.float32)
    )
    wrong = x[rounding(x) != x.bfloat16().float()]
    return wrong[0].item() if len(wrong) else math.nan


# %% exercise="1.15.1" hint="rounds to infinity"
def find_bug(rounding) -> float:
    halves = (torch.arange(2**15 - 2**8) << 16) + 0x8000
    x = torch.cat([halves, halves + 1]).to(torch.int32).view(torch.float32)
    x = torch.cat([x, -x])
    wrong = x[rounding(x) != x.bfloat16().float()]
    return wrong[0].item() if len(wrong) else math.nan


# %% exercise="1.15.1" hint="not the result"
def find_bug(rounding) -> float:
    ties = torch.arange(1000, dtype=torch.int32) * 65536 + 0x3F808000
    x = ties.view(torch.float32)
    x = torch.cat([x, x.nextafter(2 * x), -x, -x / 2.0**130, torch.tensor([3.4e38])])
    wrong = x[rounding(x) != x.bfloat16().float()]
    return rounding(wrong)[0].item() if len(wrong) else math.nan


# %% exercise="1.15.2" hint="not a coin"
def stochastic_bf16(x: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    low = x.view(torch.int32) & -65536
    exact = (x.view(torch.int32) & 0xFFFF) == 0
    up = low + torch.where(exact | (draws < 32768), 0, 65536)
    return up.to(torch.int32).view(torch.float32)


# %% exercise="1.15.2" hint="the draws must decide"
def stochastic_bf16(x: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    return x.bfloat16()


# %% exercise="1.15.2" hint="ends are exchanged"
def stochastic_bf16(x: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    bits = x.view(torch.int32)
    up = draws >= (bits & 0xFFFF)
    return ((bits & -65536) + up * 65536).to(torch.int32).view(torch.float32)


# %% exercise="1.15.2" hint="the low 16 bits are 0"
def stochastic_bf16(x: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    return (x.view(torch.int32) + draws).view(torch.float32)


# %% exercise="1.15.2" hint="every draw counts once"
def stochastic_bf16(x: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    bits = x.view(torch.int32)
    up = draws <= (bits & 0xFFFF)
    return ((bits & -65536) + up * 65536).to(torch.int32).view(torch.float32)


# %% exercise="1.15.3" hint="a power of two"
def mx_block(block: torch.Tensor, max_exponent: int, round_element) -> torch.Tensor:
    largest = block.abs().max()
    if largest == 0:
        return block
    scale = largest / round_element(torch.tensor(1e9))
    return round_element(block / scale) * scale


# %% exercise="1.15.3" hint="neither rounded nor up"
def mx_block(block: torch.Tensor, max_exponent: int, round_element) -> torch.Tensor:
    largest = block.abs().max()
    if largest == 0:
        return block
    scale = 2.0 ** (math.ceil(math.log2(largest)) - max_exponent)
    return round_element(block / scale) * scale


# %% exercise="1.15.3" hint="minus that of the element format"
def mx_block(block: torch.Tensor, max_exponent: int, round_element) -> torch.Tensor:
    largest = block.abs().max()
    if largest == 0:
        return block
    scale = 2.0 ** math.floor(math.log2(largest))
    return round_element(block / scale) * scale


# %% exercise="1.15.3" hint="it stays zero"
def mx_block(block: torch.Tensor, max_exponent: int, round_element) -> torch.Tensor:
    scale = 2.0 ** ((block.abs().max()).log2().floor() - max_exponent)
    return round_element(block / scale) * scale
