"""Give a pretrained checkpoint the three latent tokens, each one id."""

from pathlib import Path

from launch.errors import UserError
from realvr.families import family_of
from realvr.families.base import END, LATENT, START


def add_tokens(source: str, folder: Path) -> list[int]:
    """Write `source` with `<|lvr_start|>`, `<|lvr|>`, `<|lvr_end|>` to `folder`; returns their ids.

    New rows of the embeddings and of the output layer begin at the mean of the old ones: an average token, neither
    likely nor unlikely. Rows that a checkpoint holds in reserve are used before any are added. UserError when `folder`
    is in use, the family is unknown, or the tokens are there already.
    """
    import torch
    from tokenizers import AddedToken
    from transformers import AutoModelForImageTextToText, AutoProcessor

    family_of(source)
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder}: is not empty; name a new folder")
    processor = AutoProcessor.from_pretrained(source)
    tokenizer = processor.tokenizer
    known = [token for token in (START, LATENT, END) if token in tokenizer.get_vocab()]
    if known:
        raise UserError(f"{source}: has {', '.join(known)} already; use it as it is")
    tokenizer.add_tokens(
        [AddedToken(t, special=True, normalized=False) for t in (START, LATENT, END)], special_tokens=True
    )
    ids = tokenizer.convert_tokens_to_ids([START, LATENT, END])
    model = AutoModelForImageTextToText.from_pretrained(source, dtype="auto")
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    with torch.no_grad():
        for weight in {id(w): w for w in (model.get_input_embeddings().weight, model.lm_head.weight)}.values():
            weight[ids] = weight[: min(ids)].float().mean(0).to(weight.dtype)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return ids
