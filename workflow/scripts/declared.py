"""What rules are given that a rule of Snakemake does not say by itself: parameters as text, and all that may come."""

import json


class Cfg(dict):
    """Parameters of a rule. As text they are JSON, which is what `kvlab --params` takes."""

    def __str__(self):
        return json.dumps(self)


class Declared:
    """A function of a job's wildcards, and `every`thing that it may return; dvc.yaml is written from that."""

    def __init__(self, function, every):
        self.function, self.every = function, every
        self.__name__ = function.__name__

    def __call__(self, wildcards):
        return self.function(wildcards)
