# In which order jobs begin: those of the model that leads first, as its chain is the longest, then those of the second,
# and so on; within a model those that other rules put first. What a model is made from comes before all.
from functools import partial


def model_first(own, wildcards):
    """The priority of a rule's job: its model's place, then the rule's own priority."""
    return own + 100 * (len(MODELS) - list(MODELS).index(wildcards.model))


for ordered in workflow.rules:
    if "model" in ordered.wildcard_names:
        ordered.priority = partial(model_first, ordered.priority)
    elif ordered.name.startswith("weights_"):
        ordered.priority = 100 * (len(MODELS) + 1)
