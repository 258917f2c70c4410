"""Where media come from: folders with archives in them, and datasets of Hugging Face.

1. `listing`         what lies in a folder
2. `folders`, `rows` each medium with its captions (`caption_tables`), and how to open it
   `archives`        what lies in a tar; `table_rows` what stands in a table
3. `media`           probes each medium and decides what it becomes; reads it when it is packed
4. `dataset_file`    several folders with settings of their own, by `dataset_keys`
"""
