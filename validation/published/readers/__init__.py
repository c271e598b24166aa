"""One file per kind of result file: from parsed JSON to `validation.published.rows.Contents`."""
