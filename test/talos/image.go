package talos

import (
	"archive/tar"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"hash"
	"io"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

// Media types of the OCI image specification.
const (
	mediaManifest = "application/vnd.oci.image.manifest.v1+json"
	mediaConfig   = "application/vnd.oci.image.config.v1+json"
	mediaLayer    = "application/vnd.oci.image.layer.v1.tar"
)

// skeleton are folders and files that a container runtime or a component expects in its image.
var (
	skeletonFolders = []string{"dev", "etc", "etc/ssl", "etc/ssl/certs", "proc", "run", "sys", "tmp", "usr", "usr/local", imageBin, imageLibexec, "var"}
	skeletonFiles   = map[string]string{
		"etc/group":  "root:x:0:\n",
		"etc/passwd": "root:x:0:0:root:/:/sbin/nologin\nnobody:x:65534:65534:nobody:/:/sbin/nologin\n",
	}
)

// blob is content with its digest: either in memory or in a file.
type blob struct {
	digest string
	size   int64
	data   []byte
	file   string
}

func (b blob) descriptor(media string) map[string]any {
	return map[string]any{"mediaType": media, "digest": b.digest, "size": b.size}
}

func jsonBlob(value any) (blob, error) {
	data, err := json.Marshal(value)
	if err != nil {
		return blob{}, fmt.Errorf("encode image: %w", err)
	}

	sum := sha256.Sum256(data)

	return blob{digest: "sha256:" + hex.EncodeToString(sum[:]), size: int64(len(data)), data: data}, nil
}

// layer says what a layer holds besides the skeleton: programs by path, from local files, and links by path.
type layer struct {
	programs map[string]string
	links    map[string]string
}

// write packs the layer, uncompressed: it travels over nothing slower than memory.
func (l layer) write(file string) (blob, error) {
	out, err := os.Create(file)
	if err != nil {
		return blob{}, fmt.Errorf("make layer: %w", err)
	}
	defer out.Close() //nolint:errcheck // reported by the flush below

	sum := sha256.New()
	if err := l.pack(tar.NewWriter(io.MultiWriter(out, sum))); err != nil {
		return blob{}, fmt.Errorf("pack layer %s: %w", file, err)
	}

	size, err := out.Seek(0, io.SeekCurrent)
	if err != nil {
		return blob{}, fmt.Errorf("measure layer %s: %w", file, err)
	}

	return blob{digest: digestOf(sum), size: size, file: file}, nil
}

func digestOf(sum hash.Hash) string { return "sha256:" + hex.EncodeToString(sum.Sum(nil)) }

func (l layer) pack(archive *tar.Writer) error {
	for _, name := range skeletonFolders {
		mode := int64(0o755)
		if name == "tmp" {
			mode = 0o1777
		}

		if err := archive.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: name + "/", Mode: mode}); err != nil {
			return err
		}
	}

	if err := packLink(archive, "var/run", "../run"); err != nil {
		return err
	}

	for name, content := range skeletonFiles {
		if err := packContent(archive, name, 0o644, int64(len(content)), strings.NewReader(content)); err != nil {
			return err
		}
	}

	for name, from := range l.programs {
		if err := packFile(archive, name, from); err != nil {
			return err
		}
	}

	for name, target := range l.links {
		if err := packLink(archive, name, target); err != nil {
			return err
		}
	}

	return archive.Close()
}

func packLink(archive *tar.Writer, name, target string) error {
	return archive.WriteHeader(&tar.Header{Typeflag: tar.TypeSymlink, Name: name, Linkname: target, Mode: 0o777})
}

func packFile(archive *tar.Writer, name, from string) error {
	file, err := os.Open(from)
	if err != nil {
		return err
	}
	defer file.Close() //nolint:errcheck // only read

	info, err := file.Stat()
	if err != nil {
		return err
	}

	return packContent(archive, name, 0o755, info.Size(), file)
}

func packContent(archive *tar.Writer, name string, mode, size int64, content io.Reader) error {
	if err := archive.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: mode, Size: size}); err != nil {
		return err
	}

	_, err := io.Copy(archive, content)

	return err
}

// image is what a registry serves under a name and tag.
type image struct {
	// reference is the full name with host, as it stands in a machine configuration. Its tag is of no consequence.
	reference string
	manifest  blob
	blobs     []blob
}

func newImage(reference, entrypoint string, layers ...blob) (image, error) {
	diffIDs := make([]string, 0, len(layers))
	descriptors := make([]any, 0, len(layers))

	for _, l := range layers {
		diffIDs = append(diffIDs, l.digest) // an uncompressed layer is its own diff
		descriptors = append(descriptors, l.descriptor(mediaLayer))
	}

	config, err := jsonBlob(map[string]any{
		"architecture": "amd64",
		"os":           "linux",
		"config":       map[string]any{"Entrypoint": []string{entrypoint}, "Env": []string{"PATH=/usr/local/bin:/usr/bin:/bin"}},
		"rootfs":       map[string]any{"type": "layers", "diff_ids": diffIDs},
	})
	if err != nil {
		return image{}, err
	}

	manifest, err := jsonBlob(map[string]any{
		"schemaVersion": 2, "mediaType": mediaManifest, "config": config.descriptor(mediaConfig), "layers": descriptors,
	})
	if err != nil {
		return image{}, err
	}

	return image{reference: reference, manifest: manifest, blobs: append(slices.Clone(layers), config)}, nil
}

// name is the reference without host and tag: how a mirror is asked for it.
func (i image) name() string {
	_, name, _ := strings.Cut(i.reference, "/")
	name, _, _ = strings.Cut(name, ":")

	return name
}

// references names the images that a cluster's machines pull.
type references struct {
	etcd, apiServer, controllerManager, scheduler, kubelet, pause string
}

const (
	imageBin     = "usr/local/bin"
	imageLibexec = "usr/local/libexec"
)

// components are the programs of Kubernetes, by the name under which the shared layer offers them. The kubelet hides behind the
// wrapper that its own image adds.
var components = map[string]string{
	"etcd":                    "etcd",
	"kube-apiserver":          "kube-apiserver",
	"kube-controller-manager": "kube-controller-manager",
	"kube-scheduler":          "kube-scheduler",
	"kubelet":                 "kubelet.real",
}

// componentLayer holds every program in dir once, also where several names there are the same program.
func componentLayer(dir string) (layer, error) {
	l := layer{programs: map[string]string{}, links: map[string]string{}}

	for name, offered := range components {
		program, err := filepath.EvalSymlinks(filepath.Join(dir, name))
		if err != nil {
			return layer{}, fmt.Errorf("find component of Kubernetes: %w", err)
		}

		base := filepath.Base(program)
		l.programs[path.Join(imageLibexec, base)] = program
		l.links[path.Join(imageBin, offered)] = "../libexec/" + base
	}

	return l, nil
}

// kubeletLayer has what is in the kubelet's own image alone.
func kubeletLayer(a *assets) layer {
	return layer{
		programs: map[string]string{path.Join(imageBin, "kubelet"): a.tool("shims")},
		links:    map[string]string{path.Join(imageBin, "mount"): "kubelet", path.Join(imageBin, "umount"): "kubelet"},
	}
}

// componentImages makes all images of a cluster out of the folder with the Kubernetes components and of the tools. The images of
// the components share one layer, so that a machine pulls it once.
func componentImages(refs references, kubernetes string, a *assets, dir string) ([]image, error) {
	shared, err := componentLayer(kubernetes)
	if err != nil {
		return nil, err
	}

	plans := map[string]layer{
		"components": shared,
		"kubelet":    kubeletLayer(a),
		"pause":      {programs: map[string]string{"pause": a.tool("shims")}},
	}
	layers := map[string]blob{}

	for name, plan := range plans {
		if layers[name], err = plan.write(filepath.Join(dir, name+".tar")); err != nil {
			return nil, err
		}
	}

	var images []image

	for _, plan := range []struct {
		reference, entrypoint string
		layers                []blob
	}{
		{refs.etcd, "/usr/local/bin/etcd", []blob{layers["components"]}},
		{refs.apiServer, "/usr/local/bin/kube-apiserver", []blob{layers["components"]}},
		{refs.controllerManager, "/usr/local/bin/kube-controller-manager", []blob{layers["components"]}},
		{refs.scheduler, "/usr/local/bin/kube-scheduler", []blob{layers["components"]}},
		{refs.kubelet, "/usr/local/bin/kubelet", []blob{layers["components"], layers["kubelet"]}},
		{refs.pause, "/pause", []blob{layers["pause"]}},
	} {
		made, err := newImage(plan.reference, plan.entrypoint, plan.layers...)
		if err != nil {
			return nil, err
		}

		images = append(images, made)
	}

	return images, nil
}
