package talos

import (
	"context"
	"fmt"
	"net/http"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/client"
	"github.com/siderolabs/talos/pkg/machinery/config/machine"
)

// metadataAddresses are the addresses of metadata services: of most platforms, of Scaleway, and of Alibaba Cloud.
var metadataAddresses = []string{"169.254.169.254", "169.254.42.42", "100.100.100.200"}

// Clouds returns a bed without a cluster, for machines of BootPlatform. The handler is the metadata service of all
// platforms. The caller must call Down, unless Clouds fails.
func Clouds(ctx context.Context, metadata http.Handler, options Options) (*Bed, error) {
	b := &Bed{options: options}

	return b, b.up(ctx, []step{
		{"prepare", b.prepare},
		{"build", b.build},
		{"set up network", b.newBridge},
		{"start metadata service", func(ctx context.Context) error { return b.serveMetadata(ctx, metadata) }},
	})
}

// serveMetadata starts the metadata service in the namespace of the bridge, which is the gateway of the machines.
func (b *Bed) serveMetadata(ctx context.Context, handler http.Handler) error {
	for _, address := range metadataAddresses {
		if err := b.bridge.IP(ctx, "address add "+address+"/32 dev br0"); err != nil {
			return err
		}
	}

	listener, err := b.bridge.Listen(ctx, ":80")
	if err != nil {
		return err
	}

	server := &http.Server{Handler: handler, ReadHeaderTimeout: time.Minute}

	go server.Serve(listener) //nolint:errcheck // until Down
	b.cleanup(server.Close)

	return nil
}

// BootPlatform boots the nth machine of the bed on a platform, and waits until its API responds. It is a control plane that
// is not bootstrapped, because the API of a worker needs a control plane. serial is the serial number in SMBIOS.
func (b *Bed) BootPlatform(ctx context.Context, n int, platform, serial string) (*Machine, error) {
	address := firstAddress
	for range n + 1 {
		address = address.Next()
	}

	m, err := b.newMachine(ctx, fmt.Sprintf("talos-%d", n), address, machine.TypeControlPlane)
	if err != nil {
		return nil, err
	}

	m.boot.Platform, m.boot.Serial = platform, serial

	if err := m.PowerOn(); err != nil {
		return nil, err
	}

	return m, m.eventually(ctx, "wait for apid", func(ctx context.Context, c *client.Client) error {
		_, err := c.Version(ctx)

		return err
	})
}
