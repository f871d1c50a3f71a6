package talos

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// componentRequest matches requests for manifests and blobs of Kubernetes component images. The registry serves
// componentImage for all names and tags, because Talos selects some tags itself.
var componentRequest = regexp.MustCompile(`^/v2/(?:.+/)?(?:etcd|kube-[a-z-]+|kubelet|pause)/(manifests|blobs)/(.+)$`)

// componentImage is the repository of the image with all Kubernetes components.
const componentImage = "bed/components"

// imageTree is the component image without the Kubernetes binaries and shims, which are in its root directory.
var imageTree = tree{
	directories: []string{"dev", "etc/ssl/certs", "proc", "run", "sys", "tmp", "usr/local/bin", "var"},
	files: map[string]string{
		"etc/group":  "root:x:0:\n",
		"etc/passwd": "root:x:0:0:root:/:/sbin/nologin\nnobody:x:65534:65534:nobody:/:/sbin/nologin\n",
	},
	links: map[string]string{
		"var/run": "../run", "pause": "shims",
		"usr/local/bin/etcd":                    "/etcd",
		"usr/local/bin/kube-apiserver":          "/kube-apiserver",
		"usr/local/bin/kube-controller-manager": "/kube-controller-manager",
		"usr/local/bin/kube-scheduler":          "/kube-scheduler",
		"usr/local/bin/kubelet":                 "/shims",
		"usr/local/bin/kubelet.real":            "/kubelet",
		"usr/local/bin/mount":                   "/shims",
		"usr/local/bin/umount":                  "/shims",
	},
}

// newComponentImage returns an image with the Kubernetes binaries in a directory and the shims. It creates the directory dir
// for temporary files.
func newComponentImage(kubernetes, shims, dir string) (v1.Image, error) {
	binary, err := os.ReadFile(shims)
	if err != nil {
		return nil, fmt.Errorf("read shims: %w", err)
	}

	var layer bytes.Buffer

	archive := tar.NewWriter(&layer)
	if err := errors.Join(
		imageTree.write(dir), os.WriteFile(filepath.Join(dir, "shims"), binary, 0o755), os.Chmod(filepath.Join(dir, "tmp"), 0o777|os.ModeSticky),
		archive.AddFS(os.DirFS(dir)), archive.AddFS(os.DirFS(kubernetes)), archive.Close(),
	); err != nil {
		return nil, fmt.Errorf("pack image: %w", err)
	}

	config, err := mutate.ConfigFile(empty.Image, &v1.ConfigFile{
		OS: "linux", Architecture: "amd64", RootFS: v1.RootFS{Type: "layers"},
		Config: v1.Config{Entrypoint: []string{"/pause"}, Env: []string{"PATH=/usr/local/bin:/usr/bin:/bin"}},
	})
	if err != nil {
		return nil, fmt.Errorf("configure image: %w", err)
	}

	return mutate.AppendLayers(config, static.NewLayer(layer.Bytes(), types.DockerUncompressedLayer))
}

// serveRegistry starts the registry for the machines. It serves the component image and pushed images.
func (b *Bed) serveRegistry(ctx context.Context) error {
	listener, err := b.bridge.Listen(ctx, registryAddress.String())
	if err != nil {
		return err
	}

	images := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	server := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if match := componentRequest.FindStringSubmatch(r.URL.Path); match != nil {
			kind, reference := match[1], match[2]
			if !strings.Contains(reference, ":") { // a tag
				reference = "latest"
			}

			r.URL.Path = "/v2/" + componentImage + "/" + kind + "/" + reference
		}

		// containerd resumes an interrupted pull with an open-ended range, which this registry rejects.
		r.Header.Del("Range")
		images.ServeHTTP(w, r)
	})}

	go server.Serve(listener) //nolint:errcheck // until Close
	b.cleanup(server.Close)

	return nil
}

// Push pushes an image or an index to the registry of the bed, which mirrors all registries for the machines.
func (b *Bed) Push(ctx context.Context, reference string, image remote.Taggable) error {
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

	if err := remote.Push(mirror, image, remote.WithContext(ctx), remote.WithTransport(transport)); err != nil {
		return fmt.Errorf("push image %s: %w", reference, err)
	}

	return nil
}
