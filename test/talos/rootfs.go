package talos

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
)

// tree is a directory tree. Names are relative to its root.
type tree struct {
	directories []string
	// files maps names to contents, and links maps names of symbolic links to targets.
	files, links map[string]string
}

// write creates the tree in the directory root.
func (t tree) write(root string) error {
	var errs []error

	for _, name := range t.directories {
		errs = append(errs, os.MkdirAll(filepath.Join(root, name), 0o755))
	}

	for name, content := range t.files {
		path := filepath.Join(root, name)
		errs = append(errs, os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(content), 0o644))
	}

	for name, target := range t.links {
		path := filepath.Join(root, name)
		errs = append(errs, os.MkdirAll(filepath.Dir(path), 0o755), os.Symlink(target, path))
	}

	return errors.Join(errs...)
}

// sourceFiles maps names in Talos's root file system to files in its source.
var sourceFiles = map[string]string{
	"etc/containerd/config.toml":  "hack/containerd.toml",
	"etc/cri/containerd.toml":     "hack/cri-containerd.toml",
	"etc/cri/conf.d/00-base.part": "hack/cri-plugin.part",
	"etc/lvm/lvm.conf":            "hack/lvm.conf",
	"etc/nfsmount.conf":           "hack/nfsmount.conf",
	"usr/share/zoneinfo/Etc/UTC":  "hack/zoneinfo/Etc/UTC",
}

// rootfs returns Talos's root file system without binaries. source is the directory with the source of a version.
func rootfs(source, version string) (tree, error) {
	t := tree{
		// Without the parent directories of files and links, which write creates.
		directories: []string{
			"boot/EFI", "dev", "etc/cni/net.d", "etc/cri/conf.d/hosts", "etc/kubernetes/manifests", "mnt", "opt/cni/bin",
			"opt/containerd/bin", "opt/containerd/lib", "proc", "root", "run", "sys", "system", "tmp", "usr/lib/firmware",
			"usr/lib/modules", "usr/lib/systemd/network", "usr/lib/udev/rules.d", "usr/libexec/kubernetes", "usr/local/bin",
			"usr/local/etc/containers", "usr/local/lib/containers", "usr/local/lib/kubelet/credentialproviders", "usr/local/share",
			"usr/share/spdx", "var", ".extra",
		},
		files: map[string]string{
			// Without this marker, Talos assumes bare metal.
			"usr/etc/in-container": "true\n",
			"etc/os-release":       fmt.Sprintf("NAME=\"Talos\"\nID=talos\nVERSION_ID=%[1]s\nPRETTY_NAME=\"Talos (%[1]s)\"\n", version),
		},
		links: map[string]string{
			"bin": "usr/bin", "sbin": "usr/bin", "lib": "usr/lib", "lib64": "usr/lib", "usr/lib64": "lib", "usr/sbin": "bin",
			"etc/localtime": "/usr/share/zoneinfo/Etc/UTC", "etc/ssl/certs/ca-certificates": "ca-certificates.crt",
			"etc/pki": "/etc/ssl", "etc/ca-certificates": "/etc/ssl", "usr/share/ca-certificates": "/etc/ssl",
			"usr/local/share/ca-certificates": "/etc/ssl",
			// Talos is one binary with several names.
			"usr/bin/poweroff": "init", "usr/bin/shutdown": "init", "usr/bin/dashboard": "init",
			"usr/bin/runc": "shims",
		},
	}

	// Mount points for files of Talos.
	for _, name := range []string{
		"etc/cri/conf.d/01-registries.part", "etc/cri/conf.d/20-customization.part", "etc/cri/conf.d/base-spec.json",
		"etc/cri/conf.d/cri.toml", "etc/extensions.yaml", "etc/hostname", "etc/hosts", "etc/iscsi/initiatorname.iscsi",
		"etc/machine-id", "etc/nvme/hostid", "etc/nvme/hostnqn", "etc/resolv.conf",
		"etc/selinux/targeted/contexts/files/file_contexts", "etc/ssl/certs/ca-certificates.crt",
	} {
		t.files[name] = ""
	}

	for name, from := range sourceFiles {
		content, err := os.ReadFile(filepath.Join(source, from))
		if err != nil {
			return t, fmt.Errorf("read file of Talos: %w", err)
		}

		t.files[name] = string(content)
	}

	return t, nil
}
