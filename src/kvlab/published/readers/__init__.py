"""One file per kind of result file: from parsed JSON to `kvlab.published.rows.Contents`."""
