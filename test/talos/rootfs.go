package talos

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

var (
	// folders of Talos's root file system that are not made for a file.
	folders = []string{
		"boot/EFI", "dev", "etc/cni/net.d", "etc/cri/conf.d/hosts", "etc/kubernetes/manifests", "mnt", "opt/cni/bin",
		"opt/containerd/bin", "opt/containerd/lib", "proc", "root", "run", "sys", "system", "tmp", "usr/lib/firmware",
		"usr/lib/modules", "usr/lib/systemd/network", "usr/lib/udev/rules.d", "usr/libexec/kubernetes", "usr/local/bin",
		"usr/local/etc/containers", "usr/local/lib/containers", "usr/local/lib/kubelet/credentialproviders", "usr/local/share",
		"usr/share/spdx", "var", ".extra",
	}

	// blanks are files that Talos mounts others over.
	blanks = []string{
		"etc/cri/conf.d/01-registries.part", "etc/cri/conf.d/20-customization.part", "etc/cri/conf.d/base-spec.json",
		"etc/cri/conf.d/cri.toml", "etc/extensions.yaml", "etc/hostname", "etc/hosts", "etc/iscsi/initiatorname.iscsi",
		"etc/machine-id", "etc/nvme/hostid", "etc/nvme/hostnqn", "etc/resolv.conf",
		"etc/selinux/targeted/contexts/files/file_contexts", "etc/ssl/certs/ca-certificates.crt",
	}

	// settings come from the source of Talos.
	settings = map[string]string{
		"etc/containerd/config.toml":  "hack/containerd.toml",
		"etc/cri/containerd.toml":     "hack/cri-containerd.toml",
		"etc/cri/conf.d/00-base.part": "hack/cri-plugin.part",
		"etc/lvm/lvm.conf":            "hack/lvm.conf",
		"etc/nfsmount.conf":           "hack/nfsmount.conf",
		"usr/share/zoneinfo/Etc/UTC":  "hack/zoneinfo/Etc/UTC",
	}

	// symlinks by name.
	symlinks = map[string]string{
		"bin": "usr/bin", "sbin": "usr/bin", "lib": "usr/lib", "lib64": "usr/lib", "usr/lib64": "lib", "usr/sbin": "bin",
		"etc/localtime": "/usr/share/zoneinfo/Etc/UTC", "etc/ssl/certs/ca-certificates": "ca-certificates.crt",
		"etc/pki": "/etc/ssl", "etc/ca-certificates": "/etc/ssl", "usr/share/ca-certificates": "/etc/ssl",
		"usr/local/share/ca-certificates": "/etc/ssl",
	}

	// programs are taken from bin. Talos's one binary goes by several names.
	programs = map[string]string{
		"usr/bin/init": "machined", "usr/bin/poweroff": "machined", "usr/bin/shutdown": "machined", "usr/bin/dashboard": "machined",
		"usr/bin/containerd": "containerd", "usr/bin/containerd-shim-runc-v2": "containerd-shim-runc-v2", "usr/bin/runc": "runc",
	}

	// replacements make up the layer "limited".
	replacements = map[string]string{"usr/bin/runc": "shims", "usr/bin/runc.real": "runc"}

	// contents of files that tell Talos what it is.
	contents = map[string]string{
		// Without this marker Talos believes to be on bare metal.
		"usr/etc/in-container": "true\n",
		"etc/os-release":       "NAME=\"Talos\"\nID=talos\nVERSION_ID=%[1]s\nPRETTY_NAME=\"Talos (%[1]s)\"\n",
	}
)

// assembleRootfs lays out rootfs and limited beside the folder bin, with files from the folder talos with its source.
func assembleRootfs(talos, version, dir string) error {
	root := filepath.Join(dir, "rootfs")

	for _, folder := range folders {
		if err := os.MkdirAll(filepath.Join(root, folder), 0o755); err != nil {
			return fmt.Errorf("make folder of root file system: %w", err)
		}
	}

	if err := writeFiles(root, talos, version); err != nil {
		return err
	}

	for name, target := range symlinks {
		if err := os.Symlink(target, filepath.Join(root, name)); err != nil {
			return fmt.Errorf("make link in root file system: %w", err)
		}
	}

	if err := linkPrograms(dir, root, programs); err != nil {
		return err
	}

	return linkPrograms(dir, filepath.Join(dir, "limited"), replacements)
}

func writeFiles(root, talos, version string) error {
	for _, name := range blanks {
		if err := writeFile(filepath.Join(root, name), nil); err != nil {
			return err
		}
	}

	for name, from := range settings {
		content, err := os.ReadFile(filepath.Join(talos, from))
		if err != nil {
			return fmt.Errorf("read file of Talos: %w", err)
		}

		if err := writeFile(filepath.Join(root, name), content); err != nil {
			return err
		}
	}

	for name, content := range contents {
		if err := writeFile(filepath.Join(root, name), []byte(strings.ReplaceAll(content, "%[1]s", version))); err != nil {
			return err
		}
	}

	return nil
}

func writeFile(path string, content []byte) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return fmt.Errorf("make folder: %w", err)
	}

	if err := os.WriteFile(path, content, 0o644); err != nil {
		return fmt.Errorf("write file: %w", err)
	}

	return nil
}

func linkPrograms(dir, root string, names map[string]string) error {
	for name, program := range names {
		target := filepath.Join(root, name)

		if err := os.MkdirAll(filepath.Dir(target), 0o755); err != nil {
			return fmt.Errorf("make folder for program: %w", err)
		}

		if err := os.Link(filepath.Join(dir, "bin", program), target); err != nil {
			return fmt.Errorf("link program: %w", err)
		}
	}

	return nil
}
