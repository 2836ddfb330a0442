"""A reward that a random model can earn: it makes groups differ without any training before."""


def low_bytes(completions, completion_ids, **columns):
    """Share of a completion's ids below 128."""
    return [sum(i < 128 for i in ids) / len(ids) for ids in completion_ids]
