"""S3, and stores that speak its protocol, through s3fs.

An object appears when its last request is answered, never before, so there is nothing to rename. What is
longer than one part is uploaded in parts, several at a time; the request that completes it makes it
visible, and with ``If-None-Match`` only if the name is free. Parts of an upload that was cut off cost
money and are not listed as
objects: `uploads` finds them, and retention ends them.

Not every store that speaks the protocol heeds ``If-None-Match``: some ignore it, so that two writers both
"create". So `easyckpt.storage.fsspec` tries it before it relies on it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from typing import Any

from easyckpt.digest import bytes_digest
from easyckpt.storage.base import Parts, check_parts
from easyckpt.storage.patience import Patience
from easyckpt.storage.remote import BlobRemote, RawEntry, lanes_of, seconds_of
from easyckpt.storage.trouble import RemoteTrouble, Trouble

__all__ = ["PART_BYTES", "S3Remote"]

PART_BYTES = 16 << 20
"""Of an upload in parts: as large as one request may be within its time on a slow line, times what is in
flight."""

PARTS_MAX = 10_000
"""S3's own limit, https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html."""

LIST_PAGES_MAX = 10_000
"""Of 1,000 names each."""

UPLOAD_PREFIX = ".new-"

_OPTIONS = {
    # All retries are ours (easyckpt.storage.patience).
    "config_kwargs": {"retries": {"total_max_attempts": 1}, "max_pool_connections": 16},
}


class S3Remote(BlobRemote):
    """See the module.

    Args:
        patience: repeats requests.
        pool: makes several requests at a time.
    """

    def __init__(self, patience: Patience, pool: Callable[[], Executor]) -> None:
        pick = lanes_of("s3", _OPTIONS)

        def once() -> Any:
            fs = pick()
            fs.retries = 1
            return fs

        super().__init__(once, patience)
        self._pool = pool

    def _call(self, method: str, **arguments: Any) -> Any:
        return self._pick().call_s3(method, timeout=self._patience.limits.request_s, **arguments)

    def _ask(self, method: str, **arguments: Any) -> Any:
        return self._patience.run(lambda: self._call(method, **arguments))

    # ----- writing -----

    def put(self, name: str, data: memoryview, *, create: bool, parts: Parts | None = None) -> None:
        """See `Remote`."""
        bucket, key = _split(name)
        condition = {"IfNoneMatch": "*"} if create else {}
        if len(data) > PART_BYTES:
            self._put_parts(name, data, condition=condition, parts=parts)
            return
        value = bytes(data)
        check_parts(memoryview(value), parts)

        def request() -> bool:
            self._call("put_object", Bucket=bucket, Key=key, Body=value, **condition)
            return True

        self._patience.run(request, done=self.is_ours(name, data) if create else None)

    def _put_parts(
        self, name: str, data: memoryview, *, condition: dict[str, str], parts: Parts | None
    ) -> None:
        bucket, key = _split(name)
        upload = self._ask("create_multipart_upload", Bucket=bucket, Key=key)["UploadId"]
        at = {"Bucket": bucket, "Key": key, "UploadId": upload}
        # What is proved at once is sent at once, so that hardly any time lies between.
        stretch, part_bytes = _cut(len(data), proved_bytes=PART_BYTES if parts is None else parts.bytes)
        per_stretch = -(-stretch // part_bytes)

        def send(number: int) -> list[dict[str, Any]]:
            begin = number * stretch
            view = data[begin : begin + stretch]
            if parts is not None:
                for offset in range(0, len(view), parts.bytes):
                    parts.check(begin + offset, view[offset : offset + parts.bytes])
            sent = []
            for index, offset in enumerate(range(0, len(view), part_bytes)):
                part = {"PartNumber": number * per_stretch + index + 1}
                body = bytes(view[offset : offset + part_bytes])
                sent.append({**part, "ETag": self._ask("upload_part", Body=body, **part, **at)["ETag"]})
            return sent

        def complete() -> bool:
            upload_parts = {"Parts": [part for stretch_sent in sent for part in stretch_sent]}
            self._call("complete_multipart_upload", MultipartUpload=upload_parts, **at, **condition)
            return True

        try:
            sent = list(self._pool().map(send, range(-(-len(data) // stretch))))
            # The upload is gone once it was completed: a second attempt is told so, or of a conflict.
            self._patience.run(complete, done=self.is_ours(name, data))
        except BaseException:
            with contextlib.suppress(RemoteTrouble):  # what failed is raised; retention ends the upload later
                self._patience.run(lambda: self._call("abort_multipart_upload", **at))
            raise

    # ----- looking -----

    def info(self, name: str) -> RawEntry | None:
        """See `Remote`."""
        bucket, key = _split(name)
        try:
            head = self._ask("head_object", Bucket=bucket, Key=key)
        except RemoteTrouble as trouble:
            if trouble.kind is Trouble.MISSING:
                return None
            raise
        return RawEntry(name=name, bytes=head["ContentLength"], mtime_s=seconds_of(head.get("LastModified")))

    def find(self, prefix: str) -> list[RawEntry]:
        """See `Remote`."""
        bucket, start = _split(prefix)
        found = []
        for page in self._pages("list_objects_v2", Bucket=bucket, Prefix=start):
            for item in page.get("Contents", ()):
                name = f"{bucket}/{item['Key']}"
                found.append(
                    RawEntry(name=name, bytes=item["Size"], mtime_s=seconds_of(item.get("LastModified")))
                )
        return found

    def _pages(self, method: str, **arguments: Any) -> Iterable[Any]:
        token: dict[str, Any] = {}
        for _ in range(LIST_PAGES_MAX):
            page = self._ask(method, **arguments, **token)
            yield page
            if not page.get("IsTruncated"):
                return
            token = {"ContinuationToken": page["NextContinuationToken"]}

    def delete(self, name: str) -> None:
        """See `Remote`."""
        bucket, key = _split(name)
        try:
            self._ask("delete_object", Bucket=bucket, Key=key)
        except RemoteTrouble as trouble:
            if trouble.kind is not Trouble.MISSING:
                raise

    # ----- uploads that were cut off -----

    def uploads(self, prefix: str) -> list[RawEntry]:
        """See `Remote`. Named ``<folder>/.new-<digest of the upload>-<name>``."""
        return [entry for entry, _ in self._uploads(prefix)]

    def _uploads(self, prefix: str) -> list[tuple[RawEntry, dict[str, str]]]:
        bucket, start = _split(prefix)
        try:
            page = self._ask("list_multipart_uploads", Bucket=bucket, Prefix=start)
        except RemoteTrouble as trouble:
            if trouble.kind in (Trouble.DENIED, Trouble.REFUSED, Trouble.MISSING):
                return []  # a right that few grant, or a store that lacks it: nothing can be swept
            raise
        found = []
        for item in page.get("Uploads", ()):
            folder, slash, last = f"{bucket}/{item['Key']}".rpartition("/")
            hidden = f"{folder}{slash}{UPLOAD_PREFIX}{bytes_digest(item['UploadId'].encode())[:16]}-{last}"
            entry = RawEntry(name=hidden, bytes=0, mtime_s=seconds_of(item.get("Initiated")))
            found.append((entry, {"Bucket": bucket, "Key": item["Key"], "UploadId": item["UploadId"]}))
        return found

    def end_upload(self, name: str) -> None:
        """See `Remote`."""
        folder = name.rpartition("/")[0] + "/"
        for entry, at in self._uploads(folder):
            if entry.name == name:
                self._ask("abort_multipart_upload", **at)


def _cut(length: int, *, proved_bytes: int) -> tuple[int, int]:
    """Length of a stretch, a multiple of what is proved at once, and of the upload's parts within it."""
    least = max(PART_BYTES, -(-length // PARTS_MAX))
    stretch = proved_bytes * -(-least // proved_bytes)
    return stretch, PART_BYTES if least == PART_BYTES and stretch % PART_BYTES == 0 else stretch


def _split(name: str) -> tuple[str, str]:
    bucket, _, key = name.partition("/")
    return bucket, key
