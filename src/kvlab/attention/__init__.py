"""What attention reads in place of a whole cache: latents, chosen blocks, summaries of chunks, a plan by layer."""
