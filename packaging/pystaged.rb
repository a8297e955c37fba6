# Homebrew's formula, for a tap; OWNER is the repository's. A release adds its `url` and `sha256`.
#   brew tap-new OWNER/pystaged && cp packaging/pystaged.rb "$(brew --repository OWNER/pystaged)/Formula"
#   brew install --HEAD OWNER/pystaged/pystaged
class Pystaged < Formula
  desc "Staged speculative decoding for quantized GGUF models"
  homepage "https://github.com/OWNER/pystaged"
  license "MIT"
  head "https://github.com/OWNER/pystaged.git", branch: "main"

  depends_on "python@3.13"

  def install
    # pip takes what Homebrew has no formula for, such as the one llama-cpp-python whose libraries pystaged is linked to.
    system Formula["python@3.13"].opt_bin/"python3.13", "-m", "venv", libexec
    ENV["CMAKE_ARGS"] = "-C #{buildpath}/cmake/only_libllama.cmake"
    system libexec/"bin/pip", "install", "--no-cache-dir", "-r", "cmake/requirements.txt"
    ENV.delete("CMAKE_ARGS")
    system libexec/"bin/pip", "install", "--no-cache-dir", "--no-build-isolation", "#{buildpath}[server,smollm2]"
    bin.install_symlink libexec/"bin/pystaged"
  end

  test do
    receipt = testpath/"text.receipt"
    system bin/"pystaged", "generate", "def fibonacci(n):", "--model", "bundled", "--max-tokens", "16", "--receipt", receipt
    system bin/"pystaged", "verify", receipt
  end
end
