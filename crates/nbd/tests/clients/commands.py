# Run by nbdsh, which provides `nbd` and `h`. Every option, command, flag and error, with the client's
# own checks off where the request is invalid.
#
# Arguments: the URI of the server without an export, and with one behind `%s`.

import errno
import sys

uri = sys.argv[1]
MIB = 1 << 20


def connect(name, structured=True, contexts=("base:allocation",), flags=None):
    client = nbd.NBD()
    client.set_strict_mode(0)
    client.set_request_structured_replies(structured)
    for context in contexts if structured else ():
        client.add_meta_context(context)
    if flags is not None:
        client.set_handshake_flags(flags)
    client.connect_uri(uri % name)
    return client


def fails(number, call, *arguments):
    try:
        call(*arguments)
    except nbd.Error as error:
        assert error.errno == errno.errorcode[number], (error.errno, call, arguments)
        return str(error)
    raise AssertionError((call, arguments))


def extents(client, count, offset, flags=0):
    found = []

    def collect(context, at, entries, error):
        assert context == "base:allocation" and at == offset
        found.extend(zip(entries[::2], entries[1::2]))

    client.block_status(count, offset, collect, flags)
    return found


def chunks(client, count, offset, flags=0):
    found = []

    def collect(data, at, status, error):
        found.append((at, len(data), status))

    data = client.pread_structured(count, offset, collect, flags)
    return bytes(data), sorted(found)


# Options.
client = nbd.NBD()
client.set_opt_mode(True)
client.connect_uri(uri % "disk")
names = {}
assert client.opt_list(lambda name, text: names.update({name: text})) == len(names)
assert names == {
    "broken": "", "disk": "for clients", "fenced": "", "full": "", "read-only": "", "slow": "",
}, names
contexts = []
assert client.opt_list_meta_context(contexts.append) == 1 and contexts == ["base:allocation"]
client.set_request_block_size(True)
client.set_full_info(True)
client.opt_info()
assert client.get_canonical_export_name() == "disk"
assert client.get_export_description() == "for clients"
sizes = (nbd.SIZE_MINIMUM, nbd.SIZE_PREFERRED, nbd.SIZE_MAXIMUM)
assert [client.get_block_size(size) for size in sizes] == [1, 4096, 32 * MIB]
client.set_export_name("none")
fails(errno.ENOENT, client.opt_info)
fails(errno.ENOENT, client.opt_go)
client.set_export_name("")
client.opt_info()
assert client.get_canonical_export_name() == "disk"
client.opt_go()
assert client.get_structured_replies_negotiated() and client.can_df()
client.shutdown()
client = nbd.NBD()
client.set_opt_mode(True)
client.connect_uri(uri % "disk")
client.opt_abort()
assert client.aio_is_closed()
client = nbd.NBD()
client.set_tls(nbd.TLS_ALLOW)
client.connect_uri(uri % "disk")
assert not client.get_tls_negotiated()

# Handshakes of older clients, with the option EXPORT_NAME.
for flags in (0, nbd.HANDSHAKE_FLAG_FIXED_NEWSTYLE, nbd.HANDSHAKE_FLAG_NO_ZEROES):
    client = connect("disk", flags=flags)
    assert client.get_size() == 64 * MIB + 1234
    assert client.pread(10, 0) == bytes(10)
    client.shutdown()

for structured in (True, False):
    client = connect("disk", structured)
    can = [
        client.is_read_only(), client.can_flush(), client.can_fua(), client.can_trim(),
        client.can_zero(), client.can_fast_zero(), client.can_multi_conn(), client.can_cache(),
    ]
    assert can == [False] + 7 * [True] and client.can_df() == structured

    # Reads and writes, with each flag.
    data = bytes((at * 7 + 1) & 0xFF for at in range(3 * MIB + 777))
    for flags in (0, nbd.CMD_FLAG_FUA):
        for at, count in ((0, 1), (4095, 2), (12345, 70000), (MIB - 1, len(data))):
            client.pwrite(data[:count], at, flags)
            assert client.pread(count, at, flags) == data[:count]
    client.flush()

    # Zeroes, with each flag.
    client.pwrite(data[: 5 * 4096], 0)
    client.zero(4097, 1)
    client.zero(4096, 4096, nbd.CMD_FLAG_NO_HOLE)
    client.zero(4096, 8192, nbd.CMD_FLAG_FAST_ZERO | nbd.CMD_FLAG_FUA)
    expected = data[:1] + bytes(12287) + data[12288 : 5 * 4096]
    assert client.pread(5 * 4096, 0) == expected
    client.trim(4096, 16384, nbd.CMD_FLAG_FUA)
    expected = expected[:16384] + bytes(4096)
    assert client.pread(5 * 4096, 0) == expected
    client.cache(MIB, 0)

    # Invalid requests. The connection goes on after each.
    end = client.get_size()
    fails(errno.ENOSPC, client.pwrite, b"12", end - 1)
    fails(errno.ENOSPC, client.zero, 2, end - 1)
    fails(errno.EINVAL, client.trim, 2, end - 1)
    fails(errno.EINVAL, client.cache, 2, end - 1)
    if structured:
        fails(errno.EINVAL, client.block_status, 2, end - 1, lambda *_: 0)
        fails(errno.EINVAL, client.pread, 2, end - 1)
    fails(errno.EINVAL, client.pwrite, b"1", 0, 1 << 9)
    fails(errno.EINVAL, client.zero, 1, 0, nbd.CMD_FLAG_DF)
    fails(errno.EINVAL, client.flush, nbd.CMD_FLAG_REQ_ONE)
    client.trim(0, 0)
    assert client.pread(5 * 4096, 0) == expected
    client.shutdown()

# Chunks and extents.
client = connect("disk")
client.zero(1 << 20, 0)
client.pwrite(b"x" * 4096, 8192)
client.zero(4096, 16384, nbd.CMD_FLAG_NO_HOLE)
data, found = chunks(client, 65536, 0)
assert data == bytes(8192) + b"x" * 4096 + bytes(53248)
hole = nbd.READ_HOLE
assert found == [(0, 8192, hole), (8192, 4096, nbd.READ_DATA), (12288, 53248, hole)], found
data, found = chunks(client, 65536, 0, nbd.CMD_FLAG_DF)
assert found == [(0, 65536, nbd.READ_DATA)]
assert chunks(client, 65536, 65536, nbd.CMD_FLAG_DF)[1] == [(65536, 65536, hole)]
states = [(8192, 3), (4096, 0), (4096, 3), (4096, 2), (45056, 3)]
assert extents(client, 65536, 0) == states, extents(client, 65536, 0)
assert extents(client, 65536, 0, nbd.CMD_FLAG_REQ_ONE) == states[:1]
assert extents(client, 100, 8200) == [(100, 0)]

# Many requests at the same time, which are answered in any order.
count = 64
buffers = [nbd.Buffer.from_bytearray(bytearray([at + 1]) * 65536) for at in range(count)]
cookies = [client.aio_pwrite(buffer, at * 65536) for at, buffer in enumerate(buffers)]
while client.aio_in_flight() > 0:
    client.poll(-1)
assert all(client.aio_command_completed(cookie) for cookie in cookies)
assert client.pread(count * 65536, 0) == b"".join(bytes([at + 1]) * 65536 for at in range(count))

# Connections see each other's changes.
other = connect("disk")
other.pwrite(b"from another connection", 500)
assert client.pread(23, 500) == b"from another connection"

# A block status without a context, and one that is not known.
fails(errno.EINVAL, connect("disk", contexts=("x-y:z",)).block_status, 512, 0, lambda *_: 0)

# Errors of exports.
client = connect("read-only")
assert client.is_read_only() and not client.can_trim() and not client.can_zero()
assert client.pread(9, 0) == b"read-only"
fails(errno.EPERM, client.pwrite, b"1" * 100000, 0)
fails(errno.EPERM, client.zero, 1, 0)
fails(errno.EPERM, client.trim, 1, 0)
client.flush()
client = connect("full")
client.pwrite(b"1" * MIB, 0)
fails(errno.ENOSPC, client.pwrite, b"1", MIB)
fails(errno.ENOSPC, client.zero, 1, MIB, nbd.CMD_FLAG_NO_HOLE)
client.zero(MIB, 0)
client.pwrite(b"1", MIB)
client = connect("slow")
fails(errno.ENOTSUP, client.zero, 4096, 0, nbd.CMD_FLAG_FAST_ZERO)
client.zero(4096, 0)
client = connect("broken")
assert client.pread(MIB, 0) == bytes(MIB)
fails(errno.EIO, client.pread, 1, MIB)
fails(errno.EIO, client.pread, 3 * MIB, 0)
fails(errno.EIO, client.pwrite, b"1", MIB)
simple = connect("broken", False)
fails(errno.EIO, simple.pread, 3 * MIB, 0)
assert simple.pread(MIB, 0) == bytes(MIB)
client = connect("fenced")
fails(errno.ESHUTDOWN, client.pwrite, b"1", 0)
client.poll(10000)
assert client.aio_is_closed() or client.aio_is_dead()
print("every option, command, flag and error")
