package talos

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"
)

// registry serves images to the machines: the part of the OCI distribution protocol that pulls. Nothing can be pushed.
type registry struct {
	server http.Server
	done   chan error
}

func serveRegistry(listener net.Listener, images []image) *registry {
	mux := http.NewServeMux()

	mux.HandleFunc("GET /v2/{$}", func(http.ResponseWriter, *http.Request) {})

	for _, img := range images {
		base := "GET /v2/" + img.name()

		// Clients ask by tag first and by digest then.
		for _, name := range []string{img.tag(), img.manifest.digest} {
			mux.Handle(base+"/manifests/"+name, img.manifest.handler(mediaManifest))
		}

		for _, b := range img.blobs {
			mux.Handle(base+"/blobs/"+b.digest, b.handler("application/octet-stream"))
		}
	}

	r := &registry{server: http.Server{Handler: mux, ReadHeaderTimeout: time.Minute}, done: make(chan error, 1)}

	go func() { r.done <- r.server.Serve(listener) }()

	return r
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
