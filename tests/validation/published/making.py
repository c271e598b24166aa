"""Invented files of every family, with summaries computed here and not by what is tested."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import numpy as np

BOUNDARY = [0, 1, 3]
N_LAYERS = 6


def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def write(folder: Path, name: str, data) -> Path:
    path = Path(folder) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1))
    return path


def mean(rows: list[dict], key: str) -> float:
    return sum(row[key] for row in rows) / len(rows)


def metrics(draw: np.random.Generator, ref: float, effect: float, tokens: int | None = 64) -> dict:
    alt = ref * float(np.exp(effect + 0.2 * draw.standard_normal()))
    top1 = int(draw.integers(20, 60)) / (tokens or 64)
    found = {"ppl_ref": ref, "ppl_alt": alt, "ppl_delta_rel": (alt - ref) / ref, "top1_agreement": top1}
    return found | ({"mean_abs_dlogp_true": float(draw.uniform(0.1, 1)), "n_tokens": tokens} if tokens else {})


def references(n: int, scale: float = 1.0) -> list[float]:
    return [scale * float(one) for one in np.exp(rng(1).uniform(2, 5, n))]


def vllm(n: int = 4, seed: int = 0, effect: float = 0.3, sizes: list[int] | None = None, **change) -> dict:
    draw = rng(seed)
    passages = [
        {"codec_layer_calls": 2 * N_LAYERS, "boundary_skips": 2 * len(BOUNDARY)}
        | {"metrics": metrics(draw, ref, effect)}
        for ref in references(n)
    ]
    for one, size in zip(passages, sizes or [500_000 + 1000 * i for i in range(n)], strict=True):
        one["codec_total_compressed_bytes"] = size
    data = {
        "model_name": "toy",
        "model_path": "some/toy",
        "engine": "vllm",
        "recipe": "full",
        "ctx_len": 2048,
        "n_eval": 64,
        "block_size": 512,
        "bit_width_k": 3,
        "bit_width_v": 2,
        "variance_ratio": 0.95,
        "pca_method": "randomized",
        "rsvd_target_rank_factor": 0.5,
        "q_calib": "a/folder/toy_q_calib.safetensors",
        "k_centroids": "a/K_b3.f32",
        "v_centroids": "a/V_b2.f32",
        "outlier_threshold": 2.0,
        "boundary_skip_layers": BOUNDARY,
        "share_basis_v": True,
        "n_passages": n,
        "per_passage": passages,
    } | change
    return summarised(data)


def summarised(data: dict) -> dict:
    """The summary of a vLLM cell, its verdict by the rule of the harness."""
    rows = [one["metrics"] for one in data["per_passage"]]
    change, top1 = mean(rows, "ppl_delta_rel"), mean(rows, "top1_agreement")
    accept, marginal = abs(change) <= 0.01 and top1 >= 0.95, abs(change) <= 0.03 and top1 >= 0.85
    word = "ACCEPT" if accept else "MARGINAL" if marginal else "REJECT"
    return data | {"mean_ppl_delta_rel": change, "mean_top1_agreement": top1, "verdict": word}


def snapshot(n: int = 4, **change) -> dict:
    data = vllm(n, seed=5, recipe="v9 snapshot-mode", **change)
    del data["variance_ratio"]
    for one in data["per_passage"]:
        one["n_layers_captured"] = N_LAYERS
        del one["codec_total_compressed_bytes"]
    return data


def ablation(n: int = 4) -> dict:
    whole = vllm(n)
    cells = {}
    modes = {"identity-pre": ("identity", "pre_rope", 0.0), "codec-off": ("real", "off", 1.0)}
    for seed, (name, (mode, qp, effect)) in enumerate(modes.items()):
        part = vllm(n, seed=10 + seed, effect=effect)
        keys = ("mean_ppl_delta_rel", "mean_top1_agreement", "verdict", "per_passage")
        cells[name] = {"mode": mode, "qp_mode": qp} | {key: part[key] for key in keys}
    drop = ("per_passage", "q_calib", "variance_ratio", "mean_ppl_delta_rel", "mean_top1_agreement", "verdict")
    return {key: value for key, value in whole.items() if key not in drop} | {"cells": cells}


def hf(n: int = 4, seed: int = 3, effect: float = 0.05, single: bool = True, **change) -> dict:
    """HF two passes: 63 labels, float32 throughout, no summary."""
    draw = rng(seed)
    passages = []
    for ref in references(n, 1.2):
        one = metrics(draw, ref, effect, tokens=None)
        one["top1_agreement"] = float(np.float32(int(draw.integers(30, 63)) / 63))
        if single:
            a, b = np.float32(one["ppl_ref"]), np.float32(one["ppl_alt"])
            one |= {"ppl_ref": float(a), "ppl_alt": float(b), "ppl_delta_rel": float((b - a) / a)}
        one["mean_kl"] = float(draw.uniform(0.1, 0.2))
        layers = [
            {"layer": layer, "boundary_uncompressed": True}
            if layer in BOUNDARY
            else {"layer": layer, "hd": 128, "seq": 2048, "k_mse": 0.05, "v_mse": 0.1}
            for layer in range(N_LAYERS)
        ]
        passages.append({"metrics": one, "stats": {"per_layer": layers, "n_full": 3}})
    return {
        "model_name": "toy_hf",
        "ctx_len": 2048,
        "n_eval": 64,
        "bit_width": 3,
        "pca_method": "randomized",
        "variance_ratio": 1.0,
        "skeleton_dtype": "fp16",
        "share_basis_k": False,
        "share_basis_v": True,
        "compress": "kv",
        "architecture": "pre_rope_cache",
        "per_passage": passages,
    } | change


def hf_summarised(n: int = 2) -> dict:
    """The grid's single runs: settings in `config`, means beside the passages."""
    data = hf(n)
    rows = [one["metrics"] for one in data["per_passage"]]
    moved = ("bit_width", "pca_method", "variance_ratio", "skeleton_dtype")
    return {key: value for key, value in data.items() if key not in (*moved, "n_eval", "architecture")} | {
        "config": {key: data[key] for key in moved} | {"block_size": 128, "q_precond": True, "share_basis": False},
        "ppl_delta_mean": mean(rows, "ppl_delta_rel"),
        "kl_mean": mean(rows, "mean_kl"),
        "top1_mean": mean(rows, "top1_agreement"),
    }


def qwen3(n: int = 4, **change) -> dict:
    """The later snapshot harness."""
    draw = rng(8)
    passages = []
    for ref in references(n):
        one = metrics(draw, ref, 0.1)
        passages.append(
            {
                "ppl_ref": one["ppl_ref"],
                "ppl_alt": one["ppl_alt"],
                "delta_ppl": one["ppl_delta_rel"],
                "top1_pair": int(draw.integers(40, 64)) / 64,
                "t_ref_sec": 0.1,
                "n_boundary_skipped": 6,
            }
        )
    stats = [
        {"layer": layer, "stream": stream, "boundary_skip": True}
        if layer in BOUNDARY
        else {"layer": layer, "stream": stream, "compressed_bytes": 100 + i, "whitened": False, "bit_width": 3}
        for i in range(n)
        for layer in range(N_LAYERS)
        for stream in ("K", "V")
    ]
    change_mean, top1 = mean(passages, "delta_ppl"), mean(passages, "top1_pair")
    passed, marginal = abs(change_mean) <= 0.1 and top1 >= 0.8, abs(change_mean) <= 0.2 and top1 >= 0.7
    return {
        "model_name": "toy3",
        "model_path": "some/toy3",
        "engine": "vllm",
        "recipe": "snapshot-mode (toy3)",
        "ctx_len": 2048,
        "n_eval": 64,
        "n_passages_total": n,
        "block_size": 512,
        "bit_width_k": 3,
        "bit_width_v": 2,
        "outlier_threshold": 2.0,
        "boundary_skip_layers": BOUNDARY,
        "q_calib": "x/named_but_off.safetensors",
        "k_centroids": "x/K.f32",
        "mean_delta_ppl": change_mean,
        "mean_top1_pair": top1,
        "verdict": "PASS" if passed else "MARGINAL" if marginal else "REJECT",
        "per_passage": passages,
        "codec_stats": stats,
    } | change


# Student's 97.5 % points from a printed table, by degrees of freedom, at the next lower entry of the study's.
CRITICAL = {2: 12.706, 4: 3.182, 8: 2.365, 14: 2.228, 32: 2.042, 33: 2.037, 64: 2.0, 200: 1.96}


def rigorous(n: int = 32, mode: str = "inforward", seed: int = 20, channels=("v14_Q10_K", "tq_b4_KV")) -> dict:
    draw, rows, aggregates = rng(seed), [], []
    bits = {"K": (576, 2048), "V": (2048, 576), "KV": (544, 544)}
    for passage, ref in enumerate(references(n)):
        rows.append(row(passage, "bf16_ref", None, (2048, 2048), ref, ref, 1.0))
        for channel in channels:
            alt = ref * float(np.exp(0.01 + 0.03 * draw.standard_normal()))
            kv = channel.rsplit("_", 1)[1]
            rows.append(row(passage, channel, kv, bits[kv], ref, alt, int(draw.integers(50, 65)) / 64))
    for channel in ("bf16_ref", *channels):
        own = [one for one in rows if one["channel"] == channel]
        aggregates.append(aggregate(own, n))
    return {
        "mode": mode,
        "model": "some/toy4",
        "model_name": "toy4",
        "num_layers": N_LAYERS,
        "head_dim": 128,
        "num_kv_heads": 8,
        "boundary_skip_layers": [0, 5],
        "no_boundary": False,
        "raw_bits_per_token_per_head": 2048,
        "report_ctx_tokens": 1000,
        "ctx_len": 2048,
        "n_eval": 64,
        "n_passages": n,
        "per_passage": rows,
        "aggregates": aggregates,
    }


def row(passage: int, channel: str, kv: str | None, bits: tuple, ref: float, alt: float, top1: float) -> dict:
    return {
        "passage": passage,
        "channel": channel,
        "kind": "bf16" if kv is None else channel.partition("_")[0],
        "kv_mode": kv,
        "k_bits": bits[0],
        "v_bits": bits[1],
        "delta_ppl": (alt - ref) / ref,
        "top1_pair": top1,
        "k_mse_layer0": 0.001,
        "ppl_ref": ref,
        "ppl_alt": alt,
    }


def aggregate(rows: list[dict], n: int) -> dict:
    found = {key: rows[0][key] for key in ("channel", "kind", "kv_mode", "k_bits", "v_bits")} | {"n": n}
    whole = 1000 * 8 * 512
    coded = 1000 * 8 * (rows[0]["k_bits"] + rows[0]["v_bits"]) // 8
    found["baseline_bytes_128k"] = N_LAYERS * whole
    found["kakeya_bytes_128k"] = 2 * whole + (N_LAYERS - 2) * coded
    found["total_ratio_128k"] = found["baseline_bytes_128k"] / found["kakeya_bytes_128k"]
    columns = {
        "abs_delta_ppl": [abs(one["delta_ppl"]) for one in rows],
        "delta_ppl": [one["delta_ppl"] for one in rows],
        "top1_pair": [one["top1_pair"] for one in rows],
        "k_mse_layer0": [one["k_mse_layer0"] for one in rows],
    }
    for name, values in columns.items():
        spread = statistics.stdev(values) if n > 1 else 0.0
        found[f"mean_{name}"] = float(np.mean(values))
        found[f"std_{name}"] = spread
        if name != "k_mse_layer0":
            found[f"ci95_{name}"] = CRITICAL.get(n, 0.0) * spread / n**0.5
    return found


def engines(n: int = 4) -> dict:
    draw, rows = rng(30), []
    for passage, ref in enumerate(references(n, 1.2)):
        alt = ref * float(draw.uniform(0.8, 1.0))
        rows.append(
            {
                "passage": passage,
                "ppl_hf": ref,
                "ppl_vllm": alt,
                "ppl_rel_gap": (alt - ref) / ref,
                "mean_abs_dlogp_true": float(draw.uniform(0.2, 0.5)),
                "top1_agreement": int(draw.integers(45, 60)) / 64,
                "mean_sym_kl_topk": float(draw.uniform(0.1, 0.2)),
                "n_tokens": 64,
            }
        )
    names = {
        "mean_ppl_rel_gap": "ppl_rel_gap",
        "mean_top1_agreement": "top1_agreement",
        "mean_sym_kl_topk": "mean_sym_kl_topk",
        "mean_abs_dlogp_true": "mean_abs_dlogp_true",
    }
    head = {"model_name": "toy", "model_path": "some/toy", "ctx_len": 2048, "n_eval": 64, "n_passages": n, "top_k": 20}
    return head | {"per_passage": rows} | {name: mean(rows, key) for name, key in names.items()}


def noise(engine: str = "hf", n: int = 4, power: float = 1.0, size: float = 50.0) -> dict:
    """Noise whose effect on log-probabilities is `size` times a power of sigma, passages differing in size only."""
    draw, parts = rng(40), []
    for sigma in (0.001, 0.01, 0.1):
        rows = []
        for passage, ref in enumerate(references(n)):
            alt = ref * float(np.exp(sigma * 10 + 0.01 * draw.standard_normal()))
            rows.append(
                {
                    "passage": passage,
                    "ppl_ref": ref,
                    "ppl_alt": alt,
                    "ppl_delta_rel": (alt - ref) / ref,
                    "mean_abs_dlogp_true": size * (1 + passage / 50) * sigma**power,
                    "n_tokens": 64,
                }
            )
        change, moved = mean(rows, "ppl_delta_rel"), mean(rows, "mean_abs_dlogp_true")
        parts.append(
            {
                "sigma": sigma,
                "mean_ppl_delta_rel": change,
                "mean_abs_dlogp": moved,
                "n_passages": n,
                "per_passage": rows,
            }
        )
    head = {"engine": engine, "model_name": "toy", "ctx_len": 2048, "n_eval": 64, "n_passages": n, "mode": "both"}
    return head | {"seed": 12345, "per_sigma": parts}


def single_layers() -> dict:
    config = {"bit_width_k": 3, "bit_width_v": 2, "block_size": 512, "q_calib": "b/toy_q_calib.safetensors"}
    changes = (0.5, -0.04, 0.03, 0.2, -0.05, 0.01)
    rows = [
        {"layer": layer, "mean_ppl_delta_rel": change, "mean_top1_agreement": 0.9, "t_sec": 1.0}
        for layer, change in enumerate(changes)
    ]
    head = {
        "engine": "vllm",
        "model_name": "toy",
        "ctx_len": 2048,
        "n_eval": 64,
        "n_passages": 4,
        "num_layers": N_LAYERS,
    }
    return head | {"config": config, "per_layer": rows}


def codec_error(n_layers: int = 5) -> dict:
    draw, rows = rng(50), []
    for layer in range(n_layers):
        one = {"layer": layer}
        for stream in ("K", "V"):
            a, b = draw.uniform(0.4, 0.6, 2)
            one |= {f"{stream}_mse_vllm": float(a), f"{stream}_mse_hf": float(b), f"{stream}_mse_ratio": float(a / b)}
            one |= {f"{stream}_relnorm_hf": float(draw.uniform(0.4, 0.6)), f"mean_{stream}_abs_hf": float(a)}
        rows.append(one)
    data = {"model_name": "toy", "ctx_len": 2048, "n_passages": 4, "n_layers_compared": n_layers, "per_layer": rows}
    for name in ("K_mse_ratio", "V_mse_ratio", "K_relnorm_hf"):
        values = np.array([one[name] for one in rows])
        data[f"{name}_stats"] = {
            "min": float(values.min()),
            "max": float(values.max()),
            "mean": float(values.mean()),
            "median": float(np.median(values)),
        }
    return data | {"mean_K_abs_hf": mean(rows, "mean_K_abs_hf")}


def grid() -> dict:
    rows = [
        {"bit_width": bits, "variance_ratio": ratio, "block_size": block, "q_precond": True}
        | {"ppl_delta": change, "kl": change / 2, "top1": 0.9, "seconds": 1.0}
        for bits, ratio, block, change in (
            (3, 0.9, 64, 0.2),
            (3, 0.9, 128, 0.4),
            (3, 1.0, 64, 0.1),
            (3, 1.0, 128, 0.1),
            (4, 0.9, 64, 0.1),
            (4, 1.0, 64, 0.3),
        )
    ]
    return {"model_name": "toy", "compress": "kv", "ctx_len": 1024, "rows": rows}


def sigma() -> dict:
    rows = []
    for layer in range(N_LAYERS):
        low, high = 0.1 + layer, 1000.0 * (layer + 1)
        rows.append({"layer": layer, "kv_head": 0, "eig_min": low, "eig_max": high, "condition": high / low})
        rows[-1] |= {"diag_mean": 2.0, "sigma_trace": 256.0, "off_diag_max_abs": 6.0}
    return {"head_dim": 128, "num_kv_heads": 2, "num_layers": N_LAYERS, "ridge": 0.001, "diagnostics": rows}


FAMILIES = {
    "vLLM cell": vllm,
    "vLLM ablation": ablation,
    "HF two-pass cell": hf,
    "vLLM snapshot, later harness": qwen3,
    "channels (rigorous evaluation)": rigorous,
    "engines without a codec (phase 1)": engines,
    "noise (phase 2)": noise,
    "single layers (phase 3)": single_layers,
    "codec error by layer (phase 4)": codec_error,
    "grid of means": grid,
    "Sigma_q sidecar": sigma,
}


def every(folder: Path) -> Path:
    """A folder with a file of every family, vLLM's under several names, and files that are none."""
    for index, make in enumerate(FAMILIES.values()):
        write(folder, f"part{index % 3}/{index:02d}.json", make())
    write(folder, "part0/k_only.json", vllm(seed=6, model_name="toy_k_only"))
    write(folder, "part0/v_only.json", vllm(seed=7, model_name="toy_v_only"))
    write(folder, "part1/snapshot.json", snapshot())
    write(folder, "part1/vllm_noise.json", noise("vllm"))
    write(folder, "part2/run.json", hf_summarised())
    write(folder, "rigorous_snapshot.json", rigorous(mode="snapshot", seed=21))
    write(folder, "other.json", {"hello": 1})
    (folder / "notes.txt").write_text("words")
    return folder
