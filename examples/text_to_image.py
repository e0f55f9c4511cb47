"""Draw an image: `python examples/text_to_image.py [MODEL] [--prompt TEXT] [--output FILE]`.

Without a model it writes a pipeline of a few kilobytes with random weights and draws noise with it;
nothing is downloaded.
"""

import argparse
import json
import tempfile
from pathlib import Path


def random_pipeline(folder: Path) -> Path:
    """Write a tiny Stable Diffusion pipeline with random weights; return its folder."""
    import torch
    from diffusers import (
        AutoencoderKL,
        DDIMScheduler,
        StableDiffusionPipeline,
        UNet2DConditionModel,
    )
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    torch.manual_seed(0)
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    words = [*letters, *(letter + "</w>" for letter in letters)]
    words += ["<|startoftext|>", "<|endoftext|>"]
    (folder / "words").mkdir()
    numbered = {word: i for i, word in enumerate(words)}
    (folder / "words" / "vocab.json").write_text(json.dumps(numbered))
    (folder / "words" / "merges.txt").write_text("#version: 0.2\n")
    text = CLIPTextConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=77,
        bos_token_id=len(words) - 2,
        eos_token_id=len(words) - 1,
        pad_token_id=len(words) - 1,
    )
    denoiser = UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=4,
    )
    decoder = AutoencoderKL(
        block_out_channels=[16, 32],
        down_block_types=["DownEncoderBlock2D"] * 2,
        up_block_types=["UpDecoderBlock2D"] * 2,
        latent_channels=4,
        norm_num_groups=4,
    )
    StableDiffusionPipeline(
        vae=decoder,
        text_encoder=CLIPTextModel(text),
        tokenizer=CLIPTokenizer.from_pretrained(folder / "words", model_max_length=77),
        unet=denoiser,
        scheduler=DDIMScheduler(clip_sample=False),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    ).save_pretrained(folder / "pipeline")
    return folder / "pipeline"


def main() -> None:
    """Parse options, draw one image and write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "model", nargs="?", help="folder or Hugging Face name of a pipeline"
    )
    parser.add_argument("--prompt", default="a lighthouse in a storm")
    parser.add_argument("--negative-prompt", default="")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--size", type=int, help="width and height; default: the pipeline's own"
    )
    parser.add_argument("--output", type=Path, default=Path("image.png"))
    options = parser.parse_args()

    from vllm import LLM

    from dllm_plugin.omni import pipeline_args

    with tempfile.TemporaryDirectory() as folder:
        model = options.model or str(random_pipeline(Path(folder)))
        llm = LLM(model, max_model_len=4096, **pipeline_args())
        request = {
            "prompt": options.prompt,
            "negative_prompt": options.negative_prompt,
            "num_inference_steps": options.steps,
            "seed": options.seed,
        }
        if options.size:
            request |= {"width": options.size, "height": options.size}
        (answer,) = llm.encode({"data": request}, pooling_task="plugin")
        ((image,),) = answer.outputs
        image.save(options.output)
        print(f"{options.output}: {image.width} x {image.height}")
        llm.llm_engine.engine_core.shutdown()  # at exit it would race with vLLM's own monitor


if __name__ == "__main__":
    main()
