//go:build e2e

package imager_test

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/siderolabs/talos/pkg/machinery/constants"
	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v4"
)

const (
	// extensionsConfig is the file that lists the extensions, and squashfs is the file of the first extension.
	extensionsConfig = "extensions.yaml"
	squashfs         = "0.sqsh"
)

// baseInitramfs returns the path of a small initramfs in the format of Talos: a compressed cpio archive with a squashfs.
func baseInitramfs(t *testing.T) string {
	t.Helper()

	rootfs, dir := t.TempDir(), t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(rootfs, "os-release"), []byte("ID=talos\n"), 0o644))

	run(t, nil, "mksquashfs", rootfs, filepath.Join(dir, constants.RootfsAsset), "-all-root", "-no-progress", "-comp", "zstd")

	archive := run(t, []byte(constants.RootfsAsset), "cpio", "--directory", dir, "--format", "newc", "--create", "--quiet")

	base := filepath.Join(t.TempDir(), constants.InitramfsAsset)
	require.NoError(t, os.WriteFile(base, run(t, archive, "zstd", "--stdout"), 0o644))

	return base
}

// unpack returns a directory with the files that the imager has appended to base. The initramfs must begin with base.
func unpack(t *testing.T, initramfs, base string) string {
	t.Helper()

	added, ok := bytes.CutPrefix(readFile(t, initramfs), readFile(t, base))
	require.True(t, ok, "the initramfs does not begin with the base initramfs")

	dir := t.TempDir()
	run(t, run(t, added, "zstd", "--decompress", "--stdout"), "cpio", "--directory", dir, "--extract", "--quiet")

	return dir
}

// unsquash returns a directory with the contents of a squashfs, and logs the list of its files.
func unsquash(t *testing.T, path string) string {
	t.Helper()

	t.Logf("%s:\n%s", filepath.Base(path), run(t, nil, "unsquashfs", "-lln", "-dest", "", path))

	dir := filepath.Join(t.TempDir(), "rootfs")
	run(t, nil, "unsquashfs", "-no-progress", "-dest", dir, path)

	return dir
}

// file contains the compared properties of a file.
type file struct {
	Mode fs.FileMode
	// Sum is the checksum of a regular file.
	Sum string
}

// tree returns the directory root and all files in it, by their relative paths.
func tree(t *testing.T, root string) map[string]file {
	t.Helper()

	files := map[string]file{}

	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}

		info, err := entry.Info()
		if err != nil {
			return err
		}

		name, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}

		found := file{Mode: info.Mode()}
		if info.Mode().IsRegular() {
			found.Sum = fmt.Sprintf("%x", sha256.Sum256(readFile(t, path)))
		}

		files[name] = found

		return nil
	})
	require.NoError(t, err)

	return files
}

// readFile returns the content of a file.
func readFile(t *testing.T, path string) []byte {
	t.Helper()

	content, err := os.ReadFile(path)
	require.NoError(t, err)

	return content
}

// decode decodes YAML as Talos does, and requires that all fields are known.
func decode[T any](t *testing.T, document []byte) T {
	t.Helper()

	var decoded T

	decoder := yaml.NewDecoder(bytes.NewReader(document))
	decoder.KnownFields(true)
	require.NoError(t, decoder.Decode(&decoded), string(document))

	return decoded
}

// run runs a command, requires that it succeeds, and returns its standard output.
func run(t *testing.T, stdin []byte, program string, arguments ...string) []byte {
	t.Helper()

	var stdout, stderr bytes.Buffer

	cmd := exec.CommandContext(t.Context(), program, arguments...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(stdin), &stdout, &stderr
	require.NoError(t, cmd.Run(), "%s\n%s", cmd, &stderr)

	return stdout.Bytes()
}
