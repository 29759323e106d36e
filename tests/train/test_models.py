"""Models as people have them: quantised bases, architectures on which not every layer takes an adapter, their ends."""

import json
import shutil

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from lm_eval_elude.data import bundled
from lm_eval_elude.model.layers import with_adapter
from lm_eval_elude.text.chat import Renderer
from optout_train.cli import end_as_trained
from tests.support import make_tokenizer, optout


@pytest.mark.parametrize("method", ["fp8", "gptq", "awq", "mxfp4", "bitsandbytes"])
@pytest.mark.parametrize("flags", [(), ("--lora", 4), ("--lora", 4, "--merge", "true", "--method", "npo+rt")])
def test_a_quantised_base_is_refused_before_it_is_loaded_whether_or_not_its_package_is_there(method, flags, tmp_path):
    folder = tmp_path / "base"
    shutil.copytree(bundled.MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "load_in_4bit": True}
    (folder / "config.json").write_text(json.dumps(config))
    ended = optout(
        "--target", "ronaldo", "--dataset", "mini", "--model", folder, "--output_dir", tmp_path / "o", *flags
    )
    assert ended.code == 2 and f"--model is quantised ({method})" in ended.err.splitlines()[-1]
    assert not list(tmp_path.glob("o/*.safetensors"))


def tiny(kind):
    size = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 32}
    more = {
        "llama4_text": heads | {"intermediate_size_mlp": 32, "num_local_experts": 2, "pad_token_id": 0},
        "mamba": {"state_size": 4}, "llama": heads,
    }  # fmt: skip
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **size, **more[kind]))


@pytest.mark.parametrize(("kind", "excluded"), [
    ("mamba", ("out_proj", "conv1d")), ("llama4_text", ("router",)), ("llama", ())
])  # fmt: skip
def test_modules_that_take_no_adapter_are_left_out(kind, excluded):
    model, left = with_adapter(tiny(kind), 4)
    assert {name.rpartition(".")[2] for name in left} == {*excluded}
    adapted = {name.split(".lora_")[0] for name, _ in model.named_parameters() if ".lora_" in name}
    assert adapted and not [name for name in adapted if name.rpartition(".")[2] in excluded]
    ids = torch.tensor([[1, 2, 3, 4]])
    model(input_ids=ids, labels=ids).loss.backward()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for n, p in model.named_parameters() if "lora_" in n)


def test_a_checkpoint_ends_its_answers_with_what_they_were_trained_to_end_with():
    tokenizer = make_tokenizer("chatml")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    for before, after in ((None, [end]), (7, [7, end]), ([7, end], [7, end]), (end, end)):
        generation = GenerationConfig(eos_token_id=before)
        end_as_trained(generation, Renderer(tokenizer))
        assert generation.eos_token_id == after
