package talos

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	ociregistry "github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote"
)

// registry serves images to the machines: the cluster's, which are too large to keep in memory, and pushed ones.
type registry struct {
	server http.Server
	done   chan error
}

func serveRegistry(listener net.Listener, images []image) *registry {
	mux := http.NewServeMux()
	mux.Handle("/", ociregistry.New(ociregistry.Logger(log.New(io.Discard, "", 0))))

	for _, img := range images {
		base := "GET /v2/" + img.name()

		// Whatever the tag: Talos has its own of some images. Clients ask by tag first and by digest then.
		mux.Handle(base+"/manifests/{reference}", img.manifest.handler(mediaManifest))

		for _, b := range img.blobs {
			mux.Handle(base+"/blobs/"+b.digest, b.handler("application/octet-stream"))
		}
	}

	r := &registry{server: http.Server{Handler: mux, ReadHeaderTimeout: time.Minute}, done: make(chan error, 1)}

	go func() { r.done <- r.server.Serve(listener) }()

	return r
}

// Push makes an image available to the machines under its reference, whatever its registry.
func (b *Bed) Push(ctx context.Context, reference string, index v1.ImageIndex) error {
	named, err := name.ParseReference(reference)
	if err != nil {
		return fmt.Errorf("push image %s: %w", reference, err)
	}

	host, err := name.NewRegistry(registryAddress.String(), name.Insecure)
	if err != nil {
		return fmt.Errorf("push image %s: %w", reference, err)
	}

	mirror := host.Repo(named.Context().RepositoryStr()).Tag(named.Identifier())
	transport := &http.Transport{DialContext: b.DialContext}

	defer transport.CloseIdleConnections()

	if err := remote.WriteIndex(mirror, index, remote.WithContext(ctx), remote.WithTransport(transport)); err != nil {
		return fmt.Errorf("push image %s: %w", reference, err)
	}

	return nil
}

func (b blob) handler(media string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", media)
		w.Header().Set("Docker-Content-Digest", b.digest)

		if b.file != "" {
			http.ServeFile(w, r, b.file)

			return
		}

		http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(b.data))
	})
}

func (r *registry) close() error {
	if err := r.server.Close(); err != nil {
		return fmt.Errorf("close registry: %w", err)
	}

	if err := <-r.done; !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve registry: %w", err)
	}

	return nil
}
