package talostest

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"strconv"
	"syscall"

	"github.com/siderolabs/talos/pkg/machinery/constants"
)

// blockBits is the size of a cluster's block of loopback addresses: 16,384 each, and about a thousand clusters on one host.
const blockBits = 18

// addressBlock is a range of loopback addresses reserved by this process, which keeps the second address bound.
type addressBlock struct {
	prefix netip.Prefix
	last   netip.Addr // last assigned address
	anchor net.Listener
}

// reserveBlock reserves a random free block, so that test processes on one host use different addresses.
func reserveBlock() (*addressBlock, error) {
	const attempts = 200

	var lastErr error

	for range attempts {
		prefix := randomBlock()
		anchorAddr := prefix.Addr().Next()

		anchor, err := listenAPI(anchorAddr)
		if err == nil {
			return &addressBlock{prefix: prefix, last: anchorAddr, anchor: anchor}, nil
		}

		lastErr = err

		if !errors.Is(err, syscall.EADDRINUSE) {
			break
		}
	}

	return nil, fmt.Errorf("reserve block of loopback addresses: %w", lastErr)
}

// randomBlock returns a block outside of 127.0.0.0/12, which hosts use for their own services.
func randomBlock() netip.Prefix {
	second := byte(16 + rand.IntN(239)) //nolint:gosec // not security-relevant
	third := byte(rand.IntN(4) << 6)    //nolint:gosec // as above

	return netip.PrefixFrom(netip.AddrFrom4([4]byte{127, second, third, 0}), blockBits)
}

// listen binds the next free address of the block.
func (b *addressBlock) listen() (netip.Addr, net.Listener, error) {
	for {
		next := b.last.Next()
		if !b.prefix.Contains(next) {
			return netip.Addr{}, nil, fmt.Errorf("no address left in block %s", b.prefix)
		}

		b.last = next

		if !isHost(next) {
			continue
		}

		listener, err := listenAPI(next)
		if errors.Is(err, syscall.EADDRINUSE) {
			continue
		}

		return next, listener, err
	}
}

// isHost reports whether addr does not look like a network or broadcast address, which would be confusing in test output.
func isHost(addr netip.Addr) bool {
	bytes := addr.As4()
	host := binary.BigEndian.Uint16(bytes[2:]) & 0xff

	return host != 0 && host != 255
}

func (b *addressBlock) release() { _ = b.anchor.Close() }

func listenAPI(addr netip.Addr) (net.Listener, error) {
	var config net.ListenConfig
	config.SetMultipathTCP(false) // its sockets have no filters

	listener, err := config.Listen(context.Background(), "tcp", net.JoinHostPort(addr.String(), strconv.Itoa(constants.ApidPort)))
	if err != nil {
		return nil, fmt.Errorf("listen for the Talos API on %s: %w", addr, err)
	}

	return listener, nil
}
