"""What the server reports: `ledger` adds up, `snapshot` is the JSON, `text` and `page` show it."""
