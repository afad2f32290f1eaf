"""What predictions of published runs take for granted of whole publications, with no source at hand.

Rows do not say everything. The sources that we have state BigScience's four Omni-Path links a host and
llm-foundry's 1,600 Gbit/s between A100 hosts; what they do not state is here, with the reason for taking it
all the same. fmlab.planner.predicted uses it, docs/planner-validation.md lists it.
"""

_FRAMEWORK = "the framework's default of that time; no row says so"

#: what -> why it was taken
ASSUMED: dict[str, str] = {
    "8 x 200 Gbit/s a host: Megatron SC21, Korthikanti 2022":
        "an adapter to a GPU, as llm-foundry states of its A100 hosts",
    "100 Gbit/s of each Omni-Path link: BigScience, BLOOM":
        "the record says four links, not their rate; this is the one generation that was sold",
    "400 Gbit/s a GPU: H100 96 GB, H200, B200, GB200":
        "Llama 3's paper states it of H100; of these nobody does",
    "800 Gbit/s a GPU: B300, GB300":
        "the generation of adapters that came with these chips",
    "8 x 200 Gbit/s a host: A100 of all other publications":
        "as llm-foundry states of its own",
    "gradients summed in fp32: Megatron-Core, NeMo, torchtitan, AWS": _FRAMEWORK,
    "messages hidden: Megatron-Core, NeMo, MaxText, TPU recipes": _FRAMEWORK,
    "FlashAttention-2 on Hopper: llm-foundry, torchtitan": _FRAMEWORK,
    "operators one by one: llm-foundry, NVIDIA BERT": _FRAMEWORK,
    "stages' messages scattered over tensor ranks: Megatron SC21, Korthikanti 2022":
        "the first paper describes it, and the second builds on its code",
}  # fmt: skip
