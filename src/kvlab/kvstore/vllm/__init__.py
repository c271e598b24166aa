"""Snapshots in vLLM: a KV connector that restores and saves the files of `kvlab.kvstore.snapshot`.

`settings.transfer_config` gives the settings that vLLM takes, `connector` is what vLLM then loads.
"""
