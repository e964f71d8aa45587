"""Training data: read files, tokenize them, pack the tokens, and compute each batch from the step number.

The parts, in the order in which data passes through them:

1. `find_files` finds the files of a recipe and tells their type, and `files` hashes them. Their digests are part of a
   store's identity. `remote_files` is the protocol of files that the caller finds elsewhere.
2. `readers` has a reader per `data.type`. It yields `Record`s of a file with columns, `TextChunk`s of a text, or
   `IdsChunk`s of a file that was tokenized before.
3. `fields` compiles the recipe's settings into an `ExampleBuilder`, which makes an `Example` of each record: segments
   of text or token ids with loss weight 0 or 1, for the decoder (`target`) and for an encoder (`source`).
4. `records` reads files through a reader and a builder into one stream of examples, from any file on (`read_position`).
5. `encode` tokenizes examples in batches into `EncodedDocument`s: ids and loss weights. `encode_pipeline` does so in
   threads, and `fill_store` passes the documents to the writer of a store.
6. `store_writer` writes them to a token store, which has another name until it is complete; `store` reads it. A store
   serves all sequence lengths and batch sizes. `store_journal` records what an incomplete one holds, so that a later
   run continues it. `document_rows` stores the documents of each row in the folder of the store.
7. `tokenize` connects these parts and looks in the cache first. The identity of a store is a digest of everything that
   changes its bytes.
8. `packing`, `packed_documents`, `seq2seq` and `span_corruption` are datasets: they return any rows of a store as
   arrays, without iterator state. The loss weight of a position is that of its target token. `order` gives the rows of
   each step, and their epochs; `mixing` does so for several sources.
"""
