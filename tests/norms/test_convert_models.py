"""convert_norms in models that nobody here wrote, and under the wrappers that train models."""

import importlib.util
from copy import deepcopy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

from docs.tools.compilation import batch
from pn_fairseq.norms import (
    convert_norms,
    norm_parameter_names,
    norm_report,
    padding,
    running_norms,
)
from pn_fairseq.testing.ranks import run_ranks

from ..fixtures.hugging_face import hugging_face
from .converted import MASK, B, FeedForward, T, warns

C = 16
VOCABULARY = 40
PAD = 3


def bert(layers=2):
    hf = hugging_face()
    sizes = {
        "hidden_size": C,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return hf.BertForMaskedLM(hf.BertConfig(vocab_size=VOCABULARY, **sizes, **off))


def marian():
    hf = hugging_face()
    sizes = {"d_model": C, "max_position_embeddings": 32, "dropout": 0.0}
    for side in ("encoder", "decoder"):
        for name in ("layers", "attention_heads", "ffn_dim"):
            sizes[f"{side}_{name}"] = 2
    symbols = {"pad_token_id": PAD, "decoder_start_token_id": PAD}
    return hf.MarianMTModel(hf.MarianConfig(vocab_size=VOCABULARY, **symbols, **sizes))


def assert_same_state(model, other):
    """To the bit."""
    state = model.state_dict()
    expected = other.state_dict()
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(state[name], value), name


@pytest.mark.parametrize("norm", ["batch", "prep-batch", "mabn"])
def test_from_pretrained_gives_initial_or_loaded_values(norm, tmp_path):
    """transformers builds on the meta device and gives uninitialized memory to what the
    checkpoint lacks.
    """
    plain = bert()

    class Converted(type(plain)):
        def __init__(self, config):
            super().__init__(config)
            convert_norms(self, norm, mask_from="attention_mask", layout="BTC")

    plain.save_pretrained(tmp_path / "plain")
    memory = [torch.full((C,), 7e9) for _ in range(1000)]
    del memory
    for dtype in (torch.float32, torch.bfloat16):
        model = Converted.from_pretrained(tmp_path / "plain", dtype=dtype)
        expected = Converted(plain.config)
        for one, other in zip(running_norms(model), running_norms(expected), strict=True):
            assert one.weight.dtype == dtype
            state = one.state_dict()
            for name, initial in other.state_dict().items():
                assert torch.equal(state[name].float(), initial.float()), name
    model = Converted.from_pretrained(tmp_path / "plain").train()
    tokens = torch.randint(4, VOCABULARY, (B, T))
    model(input_ids=tokens, attention_mask=(~MASK).long()).logits.sum().backward()
    model.save_pretrained(tmp_path / "converted")
    again = Converted.from_pretrained(tmp_path / "converted")
    assert int(again.bert.embeddings.LayerNorm.num_batches_tracked) == 1
    assert_same_state(again, model)


def t5():
    hf = hugging_face()
    sizes = {
        "d_model": C,
        "d_kv": 8,
        "d_ff": 32,
        "num_layers": 2,
        "num_heads": 2,
        "dropout_rate": 0.0,
    }
    return hf.T5ForConditionalGeneration(
        hf.T5Config(vocab_size=VOCABULARY, decoder_start_token_id=0, **sizes)
    )


@pytest.mark.parametrize("make", [marian, t5])  # test_frameworks.py has BERT
@pytest.mark.parametrize(
    ("norm", "checkpointing"),
    [("batch", False), ("power", True), ("batch", True)],
    ids=["plain", "checkpointed power", "checkpointed batch"],
)
def test_hugging_face(make, norm, checkpointing):
    torch.manual_seed(1)
    model = make()
    state = deepcopy(model.state_dict())
    convert_norms(model, norm, mask_from="attention_mask").load_state_dict(state)
    assert len(norm_report(model)) >= 6
    assert all(each.masks for each in norm_report(model))
    if checkpointing:
        model.activation_checkpointing_enable(
            {"use_reentrant": False, "context_fn": padding.context_fn}
        )
    model.train()
    ids = torch.randint(4, VOCABULARY, (B, T))
    # equal ones would hide which of them a norm takes
    source_mask = MASK
    target_mask = MASK.flip(0)
    masks = {
        "attention_mask": (~source_mask).long(),
        "decoder_attention_mask": (~target_mask).long(),
    }
    found = []
    for content in (PAD, 5):  # at padding
        one = deepcopy(model)
        source = ids.masked_fill(MASK, content)
        target = ids.masked_fill(target_mask, content)
        logits = one(input_ids=source, decoder_input_ids=target, **masks).logits[~target_mask]
        (logits * torch.linspace(-1, 1, VOCABULARY)).sum().backward()
        gradients = [parameter.grad for parameter in running_norms(one)[0].parameters()]
        found.append([logits, *gradients, *one.state_dict().values()])
    for one, other in zip(*found, strict=True):
        assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", [marian, t5])
def test_a_decoder_without_its_mask_does_not_take_the_one_of_the_source(make):
    model = convert_norms(make(), "batch", mask_from="attention_mask", layout="BTC").train()
    ids = torch.randint(4, VOCABULARY, (2, B, T))
    given = {"attention_mask": (~MASK).long()}
    with warns("decoder.* no padding mask has reached it "):
        model(input_ids=ids[0], decoder_input_ids=ids[1], **given)
    for report in norm_report(model):
        assert report.line in ((5, 12) if "decoder." in report.name else (4,)), str(report)
    with padding(MASK.flip(0), only="*decoder.*"):
        model(input_ids=ids[0], decoder_input_ids=ids[1], **given)
    assert {each.line for each in norm_report(model) if "decoder." in each.name} == {2}


def decayed(model):
    """The parameters to which ``Trainer`` applies weight decay; the names of the class that it
    looks for.
    """
    from transformers import Trainer

    return {*Trainer.__new__(Trainer).get_decay_parameter_names(model)}


@pytest.mark.parametrize("name", ["GPT2", "Bloom", "Bert"])
def test_weight_decay_stays_where_it_was(name):
    """Trainer decays no nn.LayerNorm, which it finds by its class: without their names GPT-2's
    gains were decayed.
    """
    hf = hugging_face()
    sizes = {"n_embd": C, "n_layer": 1, "n_head": 2}
    if name == "Bloom":
        sizes = {"hidden_size": C, "num_attention_heads": 2, "n_layer": 1, "n_head": 2}
    elif name != "GPT2":
        sizes = {"hidden_size": C, "num_attention_heads": 2}
    config = getattr(hf, f"{name}Config")(vocab_size=VOCABULARY, **sizes)
    model = getattr(hf, f"{name}Model")(config)
    before = decayed(model)
    convert_norms(model, "batch", layout="BTC")
    after = decayed(model)
    assert (after != before) == (name != "Bert")
    assert after - set(norm_parameter_names(model, nn.LayerNorm)) == before


class Conformer(nn.Module):
    """torchaudio's, whose package may be built for another torch: its file needs only torch."""

    def __init__(self):
        super().__init__()
        spec = importlib.util.find_spec("torchaudio")
        if spec is None:
            pytest.skip("torchaudio is not installed")
        path = f"{spec.submodule_search_locations[0]}/models/conformer.py"
        spec = importlib.util.spec_from_file_location("torchaudio_conformer", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        self.conformer = module.Conformer(C, 2, 32, 2, 3)
        # Its depthwise convolution itself reads padding.
        masks = ["key_padding_mask", "lengths"]
        convert_norms(
            self, "layer", only="*.conv_module.layer_norm", zero_padding=True, mask_from=masks
        )

    def forward(self, x, lengths):
        return self.conformer(x, lengths)[0]


# Several ranks.


def batches():
    generator = torch.Generator().manual_seed(4)
    # torchaudio wants the longest on each rank
    lengths = torch.tensor([[7, 4, 2, 7], [3, 7, 7, 1]])
    return torch.randn(2, 4, T, C, generator=generator), lengths


def train(model, rows, way):
    """State after two steps on ``rows`` of the batches; the loss is a sum over tokens and ranks."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    # gradients are averaged over the ranks
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * world)
    steps = list(zip(*batches(), strict=True))

    def loss(x, lengths):
        x = x[rows]
        lengths = lengths[rows]
        real = torch.arange(T) < lengths[:, None]
        if way == "BERT":
            x = x.masked_fill(~real[..., None], 1e4)
            logits = model(inputs_embeds=x, attention_mask=real.long()).logits
            return logits[real].square().mean(1).sum()
        return model(x, lengths)[real].square().sum()

    for _ in range(2):
        optimizer.zero_grad()
        if way == "two forwards":
            sum(loss(*each) for each in steps).backward()
        elif way == "no_sync" and world > 1:
            with model.no_sync():
                loss(*steps[0]).backward()
            loss(*steps[1]).backward()
        elif way == "no_sync":
            for each in steps:
                loss(*each).backward()
        else:
            loss(*steps[0]).backward()
        optimizer.step()
    return model


def converted(norm, way):
    """The model of a way to train, with synchronized norms and the weights of the unconverted
    model.
    """
    torch.manual_seed(3)
    make = {"BERT": bert, "Conformer": Conformer}.get(way, partial(FeedForward, channels=C))
    masks = {"BERT": "attention_mask", "Conformer": ["key_padding_mask", "lengths"]}.get(
        way, "lengths"
    )
    model = make()
    state = deepcopy(model.state_dict())
    only = "*.conv_module.*.3" if way == "Conformer" else "*"
    convert_norms(model, norm, only=only, mask_from=masks, sync=True).load_state_dict(state)
    return model


#: Way to train -> the package of its model.
WAYS = dict.fromkeys(
    ("broadcast_buffers", "static_graph", "no_sync", "two forwards", "FSDP2"), "torch"
)
WAYS |= {"BERT": "transformers", "Conformer": "torchaudio"}


def on_rank(rank, world, norm):
    """The state after each way to train: processes are slow to start."""
    found = {}
    for way, package in WAYS.items():
        if importlib.util.find_spec(package):
            found[way] = trained(rank, world, norm, way)
    return found


def trained(rank, world, norm, way):
    model = converted(norm, way)
    rows = slice(2 * rank, 2 * rank + 2)
    if way == "FSDP2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
        state = train(model, rows, way).state_dict()
        return {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in state.items()}
    model = DistributedDataParallel(
        model,
        broadcast_buffers=True,
        static_graph=way == "static_graph",
        find_unused_parameters=way == "BERT",
    )
    return train(model, rows, way).module.state_dict()


@pytest.fixture(
    scope="module",
    params=[
        "batch",
        *(pytest.param(norm, marks=pytest.mark.slow) for norm in ("power-v", "power")),
    ],
)
def two_ranks(request):
    return request.param, run_ranks(on_rank, 2, request.param)


@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_are_one(two_ranks, way):
    norm, ranks = two_ranks
    expected = train(converted(norm, way), slice(0, 4), way).state_dict()
    for state in (rank[way] for rank in ranks):
        assert state.keys() == expected.keys()
        for name, tensor in expected.items():
            message = f"{name}: {{}}".format
            assert_close(state[name], tensor, rtol=1e-4, atol=1e-5, msg=message)


# six seconds; test_compile.py has masks from arguments in the graph of a small model
@pytest.mark.slow
def test_bert_trains_in_one_graph_with_the_statistics_of_real_tokens():
    model = convert_norms(bert(layers=1).train(), "power", mask_from="attention_mask")
    eager = deepcopy(model)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for length in (6, 8, 10):
        mask = ~batch(length)[1]
        given = {"input_ids": torch.randint(0, 40, mask.shape), "attention_mask": mask.long()}
        for call in (eager, compiled):
            call(**given).logits[mask].square().mean().backward()
            # what stands at padding changes nothing
            given["input_ids"] = torch.where(mask, given["input_ids"], 0)
    assert_same_state(model, eager)
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]


def test_padding_of_one_thread_is_not_that_of_another():
    from concurrent.futures import ThreadPoolExecutor

    from pn_fairseq.norms.masks.padding import current_scope

    with padding(MASK), ThreadPoolExecutor(1) as pool:
        assert current_scope() is not None
        assert pool.submit(current_scope).result() is None
